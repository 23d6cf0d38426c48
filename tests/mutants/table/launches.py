"""Mistakes in what `dms_jax/generation` launches before it has read what it launched before."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/generation/"
AHEAD = "tests/generation/test_ahead.py"
RUNNING_ON = "tests/generation/test_running_on.py"
GENERATE = "tests/generation/test_generate.py"
STOPPED = (
    f"{RUNNING_ON}::test_a_lane_is_given_away_while_the_answer_that_a_stop_string_ended_goes_on"
)
ARRIVALS = "tests/generation/test_arrivals.py"
CANCEL = "tests/generation/test_cancel.py"
AT_RANDOM = "tests/generation/test_arrivals_at_random.py"
TURNS = "tests/generation/test_turns.py"
RUN_ON = "test_the_last_steps_of_a_chunk_run_while_prompts_take_the_lanes_of_others"

MUTANTS = [
    Mutant(
        "generation: a call that is left early leaves its steps to the next one",
        FOLDER + "engine.py",
        "if call.unfinished:  # the caller",
        "if False:  # the caller",
        (
            "tests/generation/test_calls.py::test_a_call_that_its_caller_leaves_early_leaves_nothing_behind",
        ),
    ),
    Mutant(
        "generation: what has no copy of its prompt used none of the cache",
        FOLDER + "scheduler.py",
        "slots = self._uncopied.pop(lane, None)",
        "slots = None",
        ("tests/generation/test_shared_prompts.py",),
    ),
    Mutant(
        "generation: an answer grows before its updates are sent",
        FOLDER + "engine.py",
        'in flight."""\n        self._notifier.notify()',
        'in flight."""\n        pass',
        (AT_RANDOM,),
    ),
    Mutant(
        "generation: the device is idle between two chunks of a closed list",
        FOLDER + "engine.py",
        "return 0 if scheduler.cancelled else len(in_flight.programs)",
        "return 0",
        (f"{AHEAD}::test_a_chunk_is_launched_before_the_last_one_is_read",),
    ),
    Mutant(
        "generation: prompts that were not read take no slots",
        FOLDER + "reservation.py",
        "slots = slots + prompts.counts[:, None]",
        "pass",
        (f"{AHEAD}::test_prompts_evict_within_the_pages_that_they_took_in_turn",),
    ),
    Mutant(
        "generation: a program of steps sets the lengths of lanes that were given away since",
        FOLDER + "reservation.py",
        "lengths = np.where(lanes[:, None], lengths, self._lengths)",
        "pass",
        (f"{RUNNING_ON}::{RUN_ON}",),
    ),
    Mutant(
        "generation: prompts that were launched set the lengths of a lane that was cleared since",
        FOLDER + "reservation.py",
        "counts[lanes] = 0",
        "pass",
        (f"{AHEAD}::test_a_lane_that_is_cleared_forgets_the_prompt_that_was_launched_for_it",),
    ),
    Mutant(
        "generation: steps behind a stop string are those of who has the lane now",
        FOLDER + "reservation.py",
        "self.epochs[lanes] += 1",
        "self.epochs[lanes] += 0",
        (STOPPED,),
    ),
    Mutant(
        "generation: the cut behind a prompt is left out where steps ran behind it",
        FOLDER + "runner.py",
        "all_rows * shape.one_pass, self.policy.shrinks)",
        "all_rows * shape.one_pass, False)",
        (
            f"{RUNNING_ON}::test_the_cut_behind_a_prompt_counts_where_the_first_token_completes_a_"
            "stop_string",
        ),
    ),
    Mutant(
        "generation: a stop string among the requests holds up the others",
        FOLDER + "in_flight.py",
        "return self.runner.host is None and",
        "return not any(each.sampling.stop_strings for each in running.values()) and",
        (STOPPED,),
    ),
    Mutant(
        "generation: values in the host's memory are written while later steps read them",
        FOLDER + "in_flight.py",
        "return self.runner.host is None and",
        "return",
        (f"{GENERATE}::test_values_in_host_memory_are_written_between_chunks",),
    ),
    Mutant(
        "generation: steps that are read late undo the first tokens behind them",
        FOLDER + "in_flight.py",
        "if self.last_tokens is program.newest:",
        "if not self.programs:",
        (f"{ARRIVALS}::test_an_answer_of_one_token_makes_room_before_anything_is_put_back",),
    ),
    Mutant(
        "generation: the last steps of a chunk are read with the next chunk",
        FOLDER + "engine.py",
        "self.in_flight.collect_steps(1)",
        "self.in_flight.collect_steps(0)",
        (
            f"{RUNNING_ON}::test_the_last_steps_of_a_chunk_run_while_prompts_take_the_lanes_of_others",
        ),
    ),
    Mutant(
        "generation: what the last steps of a chunk gave is told behind the next one",
        FOLDER + "engine.py",
        "bool(in_flight.drawn or before)",
        "bool(in_flight.drawn)",
        (
            f"{RUNNING_ON}::test_what_the_last_steps_of_a_chunk_gave_is_told_while_the_next_ones_run",
        ),
    ),
    Mutant(
        "generation: a wider program does not wait for the steps that run on",
        FOLDER + "engine.py",
        "if in_flight.programs and not reservation.fits_table(extra):",
        "if False:",
        (f"{RUNNING_ON}::test_a_wider_program_waits_for_the_steps_that_run_on",),
    ),
    Mutant(
        "generation: something is put back while steps that may end an answer run",
        FOLDER + "engine.py",
        "if self.in_flight.drawn or self.in_flight.programs:",
        "if self.in_flight.drawn:",
        (f"{AT_RANDOM}::test_whatever_comes_and_goes_each_answer_is_that_of_the_request_alone",),
    ),
    Mutant(
        "generation: a request that is cancelled while steps run goes on for another chunk",
        FOLDER + "engine.py",
        "            self._drain()\n            scheduler.finish_and",
        "            self.in_flight.collect_prompts()\n            scheduler.finish_and",
        (f"{ARRIVALS}::test_what_is_cancelled_while_steps_run_ends_before_the_next_chunk",),
    ),
    Mutant(
        "generation: a prompt that is cancelled behind steps that run does not count",
        FOLDER + "engine.py",
        "        self.in_flight.collect_steps()\n        self.in_flight.collect_prompts()\n",
        "        self.in_flight.collect_steps()\n",
        (ARRIVALS, CANCEL),
    ),
    Mutant(
        "generation: a request ends before its first token, which is drawn, is read",
        FOLDER + "scheduler.py",
        "self._cancelled_now() if cancel else set()",
        "self._cancelled_now()",
        (f"{CANCEL}::test_a_request_whose_first_token_was_not_read_is_not_ended_without_it",),
    ),
    Mutant(
        "generation: steps that run on for nobody are left to the next call",
        FOLDER + "engine.py",
        "self.in_flight.collect_steps()  # what",
        "pass  # what",
        (
            f"{RUNNING_ON}::test_steps_that_run_on_for_nobody_are_read_before_the_engine_waits_or_ends",
        ),
    ),
    Mutant(
        "generation: the device is idle while lanes are given away",
        FOLDER + "engine.py",
        "            return 1\n",
        "            return 0\n",
        (TURNS, f"{RUNNING_ON}::{RUN_ON}"),
    ),
    Mutant(
        "generation: a chunk is one program",
        FOLDER + "in_flight.py",
        "least = min(num_steps, max(_FEWEST_STEPS, num_steps // _PROGRAMS))",
        "least = num_steps",
        (f"{AHEAD}::test_lanes_are_refilled_before_the_next_chunk",),
    ),
    Mutant(
        "generation: what ended is accounted for while the device is idle",
        FOLDER + "scheduler.py",
        "self._ended.append((request, usage))",
        "record_usage(request, **usage)",
        (TURNS,),
    ),
    Mutant(
        "generation: every end of an answer waits for the prompts of others",
        FOLDER + "reservation.py",
        "if self._prompts is not None and self._prompts.counts[lane]:",
        "if self._prompts is not None:",
        (f"{AHEAD}::test_a_lane_that_is_cleared_forgets_the_prompt_that_was_launched_for_it",),
    ),
    Mutant(
        "generation: the page table of a call is as wide as its first program of steps needs",
        FOLDER + "engine.py",
        "expect(longest + num_steps)",
        "expect(longest + call.in_flight.steps_a_program(num_steps))",
        (f"{AHEAD}::test_page_tables_are_as_wide_from_the_first_program_as_a_whole_chunk_needs",),
    ),
    Mutant(
        "generation: a listener who may be late is waited for",
        FOLDER + "engine.py",
        "is_heard = source.on_tokens is not None and not source.late",
        "is_heard = source.on_tokens is not None",
        (f"{RUNNING_ON}::test_who_may_be_late_is_told_while_the_next_steps_run",),
    ),
    Mutant(
        "generation: whoever has stop strings waits for whole chunks",
        FOLDER + "engine.py",
        "(by_step or is_heard)",
        "(bool(source.sampling.stop_strings) or is_heard)",
        (f"{RUNNING_ON}::test_stop_strings_hold_up_no_chunk_of_a_call_that_nobody_listens_to",),
    ),
]
