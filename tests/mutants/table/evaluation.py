"""Mistakes in `dms_jax/evaluation`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/evaluation/"
STATISTICS = "tests/evaluation/test_statistics.py"
SANDBOX = "tests/evaluation/test_sandbox.py"
CODE = "tests/evaluation/tasks/test_code.py"
SCORE = "tests/generation/test_score.py"
GIVEN = "test_given_answers_are_scored_like_drawn_ones"
LIKELIHOOD = "tests/evaluation/test_likelihood.py"
EVALUATING = "tests/evaluation/test_evaluating.py"
AGGREGATION = "tests/evaluation/test_aggregation.py"
BOOTSTRAP = "tests/evaluation/test_bootstrap.py"
TRACES = "tests/evaluation/test_traces.py"
HYPERSCALING = "tests/evaluation/test_hyperscaling.py"
RULER = "tests/evaluation/tasks/test_ruler.py"

MUTANTS = [
    Mutant(
        "evaluation: a difference leaves out the right side's seeds",
        FOLDER + "statistics.py",
        "seeds = _seed_variance(left) + _seed_variance(right)",
        "seeds = _seed_variance(left)",
        (f"{STATISTICS}::test_seeds_of_both_sides_add_to_a_difference",),
    ),
    Mutant(
        "evaluation: chains count as problems in an error",
        FOLDER + "statistics.py",
        "return Measured(float(means.mean()), standard_error(means))",
        "return Measured(float(means.mean()), standard_error(values.ravel()))",
        (f"{STATISTICS}::test_errors_are_clustered_by_problem",),
    ),
    Mutant(
        "evaluation: all problems share their chains' seeds",
        FOLDER + "questions.py",
        "np.random.SeedSequence([seed, problem]).generate_state(chains)",
        "np.random.SeedSequence([seed]).generate_state(chains)",
        (EVALUATING,),
    ),
    Mutant(
        "evaluation: problems of several tasks skip numbers",
        FOLDER + "questions.py",
        "for index in range(start, start + (count",
        "for index in range(start + 1, start + 1 + (count",
        (f"{EVALUATING}::test_several_tasks_alternate_without_skipping",),
    ),
    Mutant(
        "evaluation: a given answer begins behind its first token",
        "dms_jax/generation/in_flight.py",
        "start = len(request.given) - int(remaining[lane])",
        "start = len(request.given) - int(remaining[lane]) + 1",
        (f"{LIKELIHOOD}::test_likelihoods_equal_a_plain_pass",),
    ),
    Mutant(
        "evaluation: end tokens end an answer that is given",
        "dms_jax/generation/engine.py",
        "end_tokens = () if source.given else engine.end_tokens",
        "end_tokens = engine.end_tokens",
        (f"{SCORE}::{GIVEN}",),
    ),
    Mutant(
        "evaluation: answers of other settings are taken over",
        FOLDER + "journal.py",
        "if number == 1 and found != settings:",
        "if number == 1 and found is None:",
        ("tests/evaluation/test_resuming.py::test_other_settings_are_refused",),
    ),
    Mutant(
        "evaluation: hyperscale, pass@W counts the best chain's rank from 0",
        FOLDER + "aggregation.py",
        "for rank in range(1, drawn + 1)]",
        "for rank in range(drawn)]",
        (AGGREGATION,),
    ),
    Mutant(
        "evaluation: hyperscale, a resample has as many problems as there are",
        FOLDER + "bootstrap.py",
        "rng.multinomial(count - 1, np.full(count, 1 / count), size=draws) / (count - 1)",
        "rng.multinomial(count, np.full(count, 1 / count), size=draws) / count",
        (BOOTSTRAP,),
    ),
    Mutant(
        "evaluation: hyperscale, a cut answer has read for its last token too",
        FOLDER + "traces.py",
        "reads=sum(trace.reads[: length - 1])",
        "reads=sum(trace.reads[:length])",
        (TRACES,),
    ),
    Mutant(
        "evaluation: the next steps wait until answers are written",
        FOLDER + "answering.py",
        "streaming=False, late=True",
        "streaming=False, late=False",
        ("tests/evaluation/test_resuming.py::test_answers_are_written_while_the_device_runs",),
    ),
    Mutant(
        "evaluation: hyperscale, gains are over sampled votes where nothing greedy was recorded",
        FOLDER + "hyperscaling_result.py",
        "return {p.length for p in own} == {p.length for p in own if p.greedy}",
        "return True",
        (
            "tests/evaluation/test_hyperscaling_result.py::test_gain_is_over_the_best_plain_decoding",
        ),
    ),
    Mutant(
        "evaluation: hyperscale, systems have no greedy points",
        FOLDER + "hyperscaling.py",
        "        yield from self.points_at(system, 0.0, (1,), self.seeds[:1])\n",
        "",
        (f"{HYPERSCALING}::test_every_system_has_greedy_points",),
    ),
    Mutant(
        "evaluation: hyperscale, what is interrupted loses its points",
        FOLDER + "hyperscaling.py",
        "error.finished = plan.result(points)",
        "error.finished = plan.result([])",
        (f"{HYPERSCALING}::test_interrupt_keeps_points_and_resumes",),
    ),
    Mutant(
        "sandbox: calls that are not on the list are allowed",
        FOLDER + "confined.py",
        "steps.append(_return(_EPERM))",
        "steps.append(_return(_ALLOW))",
        (f"{SANDBOX}::test_escapes_fail[mode]",),
    ),
    Mutant(
        "sandbox: every file can be read",
        FOLDER + "confined.py",
        "filter(os.path.exists, _READABLE)",
        '["/"]',
        (f"{SANDBOX}::test_escapes_fail[read a secret]",),
    ),
    Mutant(
        "sandbox: it runs with what the system has",
        FOLDER + "confined.py",
        'if missing and not job["weaker"]:',
        "if False:",
        (SANDBOX,),
    ),
    Mutant(
        "code: the first block of code is the answer",
        FOLDER + "tasks/code.py",
        "return found[-1] if",
        "return found[0] if",
        (f"{CODE}::test_chat_answers_to_humaneval",),
    ),
    Mutant(
        "RULER: a question for one value asks for all",
        FOLDER + "tasks/ruler/needles.py",
        "if len(answers) == 1:",
        "if len(answers) == 0:",
        (f"{RULER}::test_texts_equal_golden_files",),
    ),
    Mutant(
        "RULER: the answer is not counted into the length",
        FOLDER + "tasks/ruler/task.py",
        "return self._counter(problem) + self.family.format.answer_tokens",
        "return self._counter(problem)",
        (f"{RULER}::test_prompts_fill_the_length",),
    ),
    Mutant(
        "chat: thoughts stay in the cache for the next turn",
        "dms_jax/command_line/chat.py",
        "if read.text != completion.text:",
        "if False:",
        ("tests/command_line/test_chat.py",),
    ),
    Mutant(
        "evaluation: a figure that is unknown is NaN in JSON",
        "dms_jax/json_text.py",
        "json.dumps(_finite_or_none(data), indent=indent, default=default, allow_nan=False)",
        "json.dumps(data, indent=indent, default=default)",
        ("tests/test_json_text.py",),
    ),
    Mutant(
        "evaluation: a chat takes any name for a variable of its template",
        FOLDER + "prompting.py",
        'check_template_variables("Chat", self.variables)',
        "pass",
        ("tests/model/test_template_variables.py",),
    ),
]
