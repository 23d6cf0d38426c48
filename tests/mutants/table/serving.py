"""Mistakes in `dms_jax/serving`, and in arrivals during a call."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/serving/"
GENERATION = "dms_jax/generation/"
ANSWERS = "tests/serving/test_answers.py"
LOAD = "tests/serving/test_load.py"
PROCESSES = "tests/serving/test_processes.py"
ACCESS = "tests/serving/test_access.py"
OFFSETS = "tests/serving/test_text_offsets.py"
STRANGERS = "tests/serving/test_strangers.py"
WARM = "tests/serving/test_warm.py::test_warm_server_compiles_nothing"
ARRIVALS = "tests/generation/test_arrivals.py"
GRAMMAR = "tests/generation/test_grammar.py"
CALLS = "tests/serving/test_call_formats.py"
APIS = "tests/serving/test_apis.py"

MUTANTS = [
    Mutant(
        "serving: what a model of harmony thinks is content",
        GENERATION + "call_readers.py",
        'thought = channel is None or channel[1] == "analysis" or bool(to)',
        "thought = False",
        (f"{CALLS}::test_answer_parts_do_not_depend_on_chunks",),
    ),
    Mutant(
        "serving: results stay behind all calls of a message of harmony",
        FOLDER + "chats.py",
        "if result is not None:",
        "if False:",
        (f"{APIS}::test_harmony_answer",),
    ),
    Mutant(
        "serving: a structured answer in channels has no header",
        FOLDER + "requests.py",
        'header = "" if calls is None else calls.header',
        'header = ""',
        (f"{CALLS}::test_structured_harmony_answers",),
    ),
    Mutant(
        "serving: requests that come are drawn as the call is",
        "dms_jax/generation/engine.py",
        "if self.source.incoming is None:\n            return self.source.sampling.filter",
        "if True:\n            return self.source.sampling.filter",
        (f"{ARRIVALS}::test_requests_join_running_call",),
    ),
    Mutant(
        "serving: a client that leaves a stream has its answer written to the end",
        FOLDER + "app.py",
        "        waiting.cancel()\n        cancel()\n",
        "        waiting.cancel()\n",
        (f"{LOAD}::test_disconnect_frees_pages",),
    ),
    Mutant(
        "serving: an error ends those that wait, too",
        FOLDER + "service.py",
        "if each.index in ran]",
        "if True]",
        (f"{LOAD}::test_error_ends_only_running_requests",),
    ),
    Mutant(
        "serving: the first Ctrl-C does not wait",
        FOLDER + "server.py",
        "if received and number == signal.SIGINT:",
        "if number == signal.SIGINT:",
        (f"{PROCESSES}::test_only_second_interrupt_skips_drain",),
    ),
    Mutant(
        "serving: HTTP outlives the engine",
        FOLDER + "rpc.py",
        "        self.on_stop(False)\n",
        "",
        (f"{PROCESSES}::test_http_notifies_clients_if_engine_dies",),
    ),
    Mutant(
        "serving: a prompt with several answers counts as often",
        FOLDER + "formatting.py",
        "prompt_tokens = sum(map(len, self.request.prompts))",
        "prompt_tokens = total.prompt_tokens",
        (f"{ANSWERS}::test_several_choices_whole_and_streamed",),
    ),
    Mutant(
        "serving: a warm server, and no page table but the narrowest",
        "dms_jax/generation/reservation.py",
        "return sorted({self.table_width(each, steps=steps) for each in slots})",
        "return [self.table_width(1, steps=steps)]",
        (WARM,),
    ),
    Mutant(
        "serving: a page's own name may mean this machine",
        FOLDER + "access.py",
        "if host is not None and not self._is_own_host(host):",
        "if False:",
        (f"{ACCESS}::test_dns_rebinding_is_refused",),
    ),
    Mutant(
        "serving: a name that begins as an allowed one is allowed",
        FOLDER + "access.py",
        "name.endswith(pattern[1:])",
        "name.endswith(pattern[2:])",
        (f"{ACCESS}::test_other_hosts_are_refused",),
    ),
    Mutant(
        "serving: texts of any length are tokenized",
        "dms_jax/generation/requests.py",
        "if characters > CHARACTERS_A_TOKEN * most:",
        "if False:",
        (f"{STRANGERS}::test_huge_text_is_refused_before_tokenizing",),
    ),
    Mutant(
        "serving: what is no Exception ends the engine without a word",
        FOLDER + "service.py",
        "        except BaseException as error:  # else clients",
        "        except Exception as error:  # else clients",
        (f"{STRANGERS}::test_engine_failure_ends_all_requests",),
    ),
    Mutant(
        "serving: every part of a character is one more of them",
        "dms_jax/generation/text.py",
        "place = self._begins if goes_on else self._length",
        "place = self._length",
        (f"{OFFSETS}::test_offset_is_that_of_first_byte",),
    ),
    Mutant(
        "grammar: a greedy lane among others takes what its grammar does not allow",
        "dms_jax/generation/sampling.py",
        "tokens = jnp.where(rule.greedy, jnp.argmax(allowed, -1), tokens)",
        "tokens = jnp.where(rule.greedy, jnp.argmax(logits, -1), tokens)",
        (f"{GRAMMAR}::test_only_allowed_tokens_are_drawn",),
    ),
    Mutant(
        "grammar: two answers follow one matcher",
        "dms_jax/generation/grammar.py",
        "return _first(tokens, source).deep_copy()",
        "return _first(tokens, source)",
        (f"{GRAMMAR}::test_greedy_answer_takes_likeliest_allowed_token",),
    ),
    Mutant(
        "serving: a template leaves tools out and nobody says so",
        FOLDER + "chats.py",
        "            if tool.name not in text:\n",
        "            if False:\n",
        (f"{APIS}::test_template_without_tools_is_named",),
    ),
    Mutant(
        "data: a run of letters is one chunk",
        "dms_jax/data/tokenization.py",
        "            return places[-1]\n    return end\n",
        "            return places[-1]\n    return len(text)\n",
        ("tests/data/test_tokenization.py::test_run_of_one_letter_is_tokenized_in_chunks",),
    ),
]
