"""Mistakes in `dms_jax/serving`, and in what lets requests come while a call runs."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/serving/"
ANSWERS = "tests/serving/test_answers.py"
LOAD = "tests/serving/test_load.py"
PROCESSES = "tests/serving/test_processes.py"
ACCESS = "tests/serving/test_access.py"
OFFSETS = "tests/serving/test_text_offsets.py"
STRANGERS = "tests/serving/test_strangers.py"
WARM = "tests/serving/test_warm.py::test_a_warm_server_compiles_nothing_whatever_comes"
ARRIVALS = "tests/generation/test_arrivals.py"
SAMPLING = "tests/generation/test_sampling.py"

MUTANTS = [
    Mutant(
        "serving: requests that come are drawn as the call is",
        "dms_jax/generation/engine.py",
        "if self.source.incoming is None:\n            return self.source.sampling.filter",
        "if True:\n            return self.source.sampling.filter",
        (f"{ARRIVALS}::test_requests_join_those_that_run_and_draw_as_they_do_alone",),
    ),
    Mutant(
        "serving: a greedy lane among others draws",
        "dms_jax/generation/sampling.py",
        "if rule.greedy is not None:",
        "if False:",
        (f"{SAMPLING}::test_lanes_that_differ_draw_as_each_alone",),
    ),
    Mutant(
        "serving: a lane whose request has ended goes on with its filter",
        "dms_jax/generation/sampling.py",
        "changed |= {lane: self._idle for lane in before if lane not in samplings}",
        "pass",
        (f"{SAMPLING}::test_the_filter_of_lanes_follows_those_that_come_and_go",),
    ),
    Mutant(
        "serving: the filter that a program reads is changed for the next one",
        "dms_jax/generation/sampling.py",
        "getattr(self._filter, name).copy()",
        "getattr(self._filter, name)",
        (f"{SAMPLING}::test_the_filter_of_lanes_follows_those_that_come_and_go",),
    ),
    Mutant(
        "serving: what every lane asks is looked at before each program",
        "dms_jax/generation/sampling.py",
        "if each is not before.get(lane)",
        "if True",
        (f"{ARRIVALS}::test_what_a_lane_asks_is_looked_at_once",),
    ),
    Mutant(
        "serving: new requests wait until those that run have ended",
        "dms_jax/generation/engine.py",
        "came = None if incoming is None else incoming(idle)",
        "came = None if incoming is None else [] if scheduler.running else incoming(idle)",
        (f"{ARRIVALS}::test_requests_join_those_that_run_and_draw_as_they_do_alone",),
    ),
    Mutant(
        "serving: a client that leaves a stream has its answer written to the end",
        FOLDER + "app.py",
        "        waiting.cancel()\n        cancel()\n",
        "        waiting.cancel()\n",
        (f"{LOAD}::test_a_client_that_goes_away_frees_its_pages",),
    ),
    Mutant(
        "serving: an error ends those that wait, too",
        FOLDER + "service.py",
        "if each.index in ran]",
        "if True]",
        (f"{LOAD}::test_an_error_ends_what_ran_and_the_others_go_on",),
    ),
    Mutant(
        "serving: a request that goes on after an error has its text sent again",
        "dms_jax/generation/text.py",
        "stream.shown = len(request.text) - earlier.held",
        "stream.shown = 0",
        (f"{LOAD}::test_what_was_put_back_goes_on_when_another_one_does_not_fit",),
    ),
    Mutant(
        "serving: the first Ctrl-C does not wait",
        FOLDER + "server.py",
        "if received and number == signal.SIGINT:",
        "if number == signal.SIGINT:",
        (f"{PROCESSES}::test_only_a_second_interrupt_does_not_wait",),
    ),
    Mutant(
        "serving: a signal for the process of HTTP ends it before the answers have ended",
        FOLDER + "http_process.py",
        '        """Ignores signals: the engine\'s process drains the answers first."""\n',
        "        super().handle_exit(sig, frame)  # pyright: ignore\n",
        (f"{PROCESSES}::test_only_a_second_interrupt_does_not_wait",),
    ),
    Mutant(
        "serving: HTTP outlives the engine",
        FOLDER + "rpc.py",
        "        self.on_stop(False)\n",
        "",
        (f"{PROCESSES}::test_http_tells_its_clients_and_ends_when_the_engine_has_gone",),
    ),
    Mutant(
        "serving: the engine outlives HTTP",
        FOLDER + "rpc.py",
        "        self._on_disconnect()\n",
        "",
        (f"{PROCESSES}::test_the_server_ends_with_an_error_when_http_has_gone",),
    ),
    Mutant(
        "serving: an error on the other side is made again from its words alone",
        "dms_jax/errors.py",
        "return _remade, (type(self), self.args), self.__dict__",
        "return type(self), self.args",
        (f"{PROCESSES}::test_errors_that_are_made_otherwise_are_the_same_too",),
    ),
    Mutant(
        "serving: what is cancelled while it waits is read first",
        "dms_jax/generation/engine.py",
        "if scheduler.to_cancel:",
        "if False:",
        (f"{ARRIVALS}::test_what_is_cancelled_while_it_waits_is_never_read",),
    ),
    Mutant(
        "serving: a prompt with several answers counts as often",
        FOLDER + "protocol.py",
        "prompt = sum(map(len, self.request.prompts))",
        "prompt = total.prompt_tokens",
        (f"{ANSWERS}::test_several_choices_whole_and_streamed",),
    ),
    Mutant(
        "serving: a warm server, and steps as if a chunk were one program",
        "dms_jax/generation/engine.py",
        "num_steps = InFlight(self.runner, self.end_tokens).steps_a_program(self.chunk)",
        "num_steps = self.chunk",
        (WARM,),
    ),
    Mutant(
        "serving: a warm server, and no page table but the narrowest",
        "dms_jax/generation/reservation.py",
        "return sorted({self.table_width(each, steps=steps) for each in slots})",
        "return [self.table_width(1, steps=steps)]",
        (WARM,),
    ),
    Mutant(
        "serving: a warm server, and answers that are recomputed are forgotten",
        "dms_jax/generation/precompile.py",
        'rest = {"always": 0, "prompts": most, "never": most - whole}[policy.parallel]',
        'rest = {"always": 0, "prompts": 0, "never": most - whole}[policy.parallel]',
        (WARM,),
    ),
    Mutant(
        "serving: a warm server, and copies of a prompt are forgotten",
        "dms_jax/generation/precompile.py",
        "lanes = [calls.clear(), *calls.set_max_lengths(), *calls.copy_lanes()]",
        "lanes = [calls.clear(), *calls.set_max_lengths()]",
        (WARM,),
    ),
    Mutant(
        "serving: a prompt that is cut afterwards has room where what is left of it has",
        "dms_jax/generation/scheduler.py",
        "fits = self.runner.reservation.fits(alone, prompt=True)",
        "fits = self.runner.reservation.fits(alone)",
        (f"{LOAD}::test_a_prompt_that_is_cut_afterwards_must_fit_in_full",),
    ),
    Mutant(
        "serving: a page's own name may mean this machine",
        FOLDER + "access.py",
        "if host is not None and not self._is_own_host(host):",
        "if False:",
        (f"{ACCESS}::test_a_name_that_was_made_to_mean_this_machine_reads_nothing",),
    ),
    Mutant(
        "serving: a name that begins as an allowed one is allowed",
        FOLDER + "access.py",
        "name.endswith(pattern[1:])",
        "name.endswith(pattern[2:])",
        (f"{ACCESS}::test_other_names_are_refused",),
    ),
    Mutant(
        "serving: pages of others may ask",
        FOLDER + "access.py",
        "return host is not None and origin.partition",
        "return True or origin.partition",
        (f"{ACCESS}::test_pages_of_others_may_not_ask",),
    ),
    Mutant(
        "serving: the type of a body is not looked at",
        FOLDER + "app.py",
        '        _check_content_type(request.headers.get("content-type"))\n',
        "",
        (f"{ACCESS}::test_bodies_that_any_page_may_send_are_refused",),
    ),
    Mutant(
        "serving: any key opens a server",
        FOLDER + "access.py",
        'return scheme.lower() == "bearer" and any(found)',
        'return scheme.lower() == "bearer"',
        (f"{ACCESS}::test_a_key_is_asked_for_everywhere_but_where_health_is_told",),
    ),
    Mutant(
        "serving: texts of any length are tokenized",
        "dms_jax/generation/requests.py",
        "if characters > CHARACTERS_A_TOKEN * most:",
        "if False:",
        (f"{STRANGERS}::test_far_too_long_texts_are_refused_before_they_are_tokenized",),
    ),
    Mutant(
        "serving: a second head has all the time",
        FOLDER + "http_process.py",
        "elif self.cycle is None or self.cycle.response_complete:",
        "elif self.cycle is None:",
        (f"{STRANGERS}::test_a_head_that_does_not_come_times_out",),
    ),
    Mutant(
        "serving: the time of a head goes on from one request to the next",
        FOLDER + "http_process.py",
        "if (phase, self.cycle) != self._phase:",
        "if phase != self._phase[0]:",
        (f"{STRANGERS}::test_connections_that_ask_again_and_again_are_kept",),
    ),
    Mutant(
        "serving: a connection too many is refused, whatever the others do",
        FOLDER + "http_process.py",
        "        if not incomplete:\n",
        "        if True:\n",
        (f"{STRANGERS}::test_incomplete_requests_make_room",),
    ),
    Mutant(
        "serving: requests that run make room for a connection",
        FOLDER + "http_process.py",
        "incomplete = [each for each in others if each.is_incomplete]",
        "incomplete = others",
        (f"{STRANGERS}::test_running_requests_do_not_make_room",),
    ),
    Mutant(
        "serving: what is no Exception ends the engine without a word",
        FOLDER + "service.py",
        "        except BaseException as error:  # clients",
        "        except Exception as error:  # clients",
        (f"{STRANGERS}::test_whatever_ends_the_engine_ends_those_who_wait",),
    ),
    Mutant(
        "serving: an address is bound, and nobody listens",
        FOLDER + "server.py",
        "        taken.listen(BACKLOG)\n",
        "",
        (f"{STRANGERS}::test_an_address_is_taken_by_one_server_from_the_start",),
    ),
    Mutant(
        "serving: every part of a character is one more of them",
        "dms_jax/generation/text.py",
        "place = self._begins if goes_on else self._length",
        "place = self._length",
        (f"{OFFSETS}::test_a_token_stands_where_the_character_of_its_first_byte_does",),
    ),
    Mutant(
        "data: a packed file is unpacked whatever comes out",
        "dms_jax/data/decompression.py",
        "if self._size > self._limit:",
        "if False:",
        (
            "tests/data/test_decompression.py::test_a_gzip_file_of_one_letter_is_refused_before_it_is_unpacked",
        ),
    ),
    Mutant(
        "data: a run of letters is one chunk",
        "dms_jax/data/tokenization.py",
        "        if last == longest:\n            return last\n",
        "",
        (
            "tests/data/test_tokenization.py::test_a_run_that_no_place_is_right_for_is_cut_all_the_same",
        ),
    ),
]
