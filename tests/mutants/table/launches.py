"""Mistakes in launches that run ahead of collected results, in `dms_jax/generation`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/generation/"
OVERLAP = "tests/generation/test_overlap.py"
GENERATE = "tests/generation/test_generate.py"
STOPPED = f"{OVERLAP}::test_lane_is_reused_while_stopped_answer_runs_on"
ARRIVALS = "tests/generation/test_arrivals.py"
CANCEL = "tests/generation/test_cancel.py"
AT_RANDOM = "tests/generation/test_arrivals_at_random.py"
TURNS = "tests/generation/test_idle_device.py"
RUN_ON = "test_last_steps_of_chunk_run_while_lanes_are_refilled"

MUTANTS = [
    Mutant(
        "generation: a call that is left early leaves its steps to the next one",
        FOLDER + "engine.py",
        "if call.unfinished:  # the caller",
        "if False:  # the caller",
        ("tests/generation/test_calls.py::test_abandoned_call_leaves_nothing_behind",),
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
        (f"{OVERLAP}::test_chunk_is_launched_before_last_is_collected",),
    ),
    Mutant(
        "generation: prompts that were not read take no slots",
        FOLDER + "reservation.py",
        "slots = slots + prompts.counts[:, None]",
        "pass",
        (f"{OVERLAP}::test_overlapped_prefill_needs_no_more_pages",),
    ),
    Mutant(
        "generation: a program of steps sets the lengths of lanes that were given away since",
        FOLDER + "reservation.py",
        "lengths = np.where(lanes[:, None], lengths, self._lengths)",
        "pass",
        (f"{OVERLAP}::{RUN_ON}",),
    ),
    Mutant(
        "generation: prompts that were launched set the lengths of a lane that was cleared since",
        FOLDER + "reservation.py",
        "counts[lanes] = 0",
        "pass",
        (f"{OVERLAP}::test_cleared_lane_ignores_prefill_in_flight",),
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
        (AT_RANDOM,),
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
        (AT_RANDOM,),
    ),
    Mutant(
        "generation: the last steps of a chunk are read with the next chunk",
        FOLDER + "engine.py",
        "self.in_flight.collect_steps(1)",
        "self.in_flight.collect_steps(0)",
        (f"{OVERLAP}::test_last_steps_of_chunk_run_while_lanes_are_refilled",),
    ),
    Mutant(
        "generation: what the last steps of a chunk gave is told behind the next one",
        FOLDER + "engine.py",
        "bool(in_flight.drawn or before)",
        "bool(in_flight.drawn)",
        (f"{OVERLAP}::test_updates_of_last_steps_are_sent_while_next_steps_run",),
    ),
    Mutant(
        "generation: a wider program does not wait for the steps that run on",
        FOLDER + "engine.py",
        "if in_flight.programs and not reservation.fits_table(extra):",
        "if False:",
        (f"{OVERLAP}::test_wider_page_table_waits_for_steps_in_flight",),
    ),
    Mutant(
        "generation: something is put back while steps that may end an answer run",
        FOLDER + "engine.py",
        "if self.in_flight.drawn or self.in_flight.programs:",
        "if self.in_flight.drawn:",
        (AT_RANDOM,),
    ),
    Mutant(
        "generation: a request that is cancelled while steps run goes on for another chunk",
        FOLDER + "engine.py",
        "            self._drain()\n            scheduler.finish_and",
        "            self.in_flight.collect_prompts()\n            scheduler.finish_and",
        (f"{CANCEL}::test_cancel_while_steps_run_takes_effect_before_next_chunk",),
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
        (f"{CANCEL}::test_cancel_waits_for_first_token_in_flight",),
    ),
    Mutant(
        "generation: steps that run on for nobody are left to the next call",
        FOLDER + "engine.py",
        "self.in_flight.collect_steps()  # of answers",
        "pass  # of answers",
        (f"{OVERLAP}::test_orphaned_steps_are_collected_before_engine_idles",),
    ),
    Mutant(
        "generation: the device is idle while lanes are given away",
        FOLDER + "engine.py",
        "            return 1\n",
        "            return 0\n",
        (TURNS, f"{OVERLAP}::{RUN_ON}"),
    ),
    Mutant(
        "generation: a chunk is one program",
        FOLDER + "in_flight.py",
        "least = min(num_steps, max(_FEWEST_STEPS, num_steps // _PROGRAMS))",
        "least = num_steps",
        (f"{OVERLAP}::test_lanes_are_refilled_before_next_chunk",),
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
        (f"{OVERLAP}::test_cleared_lane_ignores_prefill_in_flight",),
    ),
    Mutant(
        "generation: the page table of a call is as wide as its first program of steps needs",
        FOLDER + "engine.py",
        "expect(longest + num_steps)",
        "expect(longest + call.in_flight.steps_a_program(num_steps))",
        (f"{OVERLAP}::test_first_page_table_is_wide_enough_for_whole_chunk",),
    ),
    Mutant(
        "generation: a listener who may be late is waited for",
        FOLDER + "engine.py",
        "is_heard = source.on_tokens is not None and not source.late",
        "is_heard = source.on_tokens is not None",
        (f"{OVERLAP}::test_late_listener_is_called_while_next_steps_run",),
    ),
    Mutant(
        "generation: whoever has stop strings waits for whole chunks",
        FOLDER + "engine.py",
        "(by_step or is_heard)",
        "(bool(source.sampling.stop_strings) or is_heard)",
        (f"{OVERLAP}::test_stop_strings_delay_no_chunk_without_listener",),
    ),
]
