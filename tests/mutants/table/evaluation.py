"""Mistakes in `dms_jax/evaluation`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/evaluation/"
SANDBOX = "tests/evaluation/test_sandbox.py"
SCORE = "tests/generation/test_score.py"
GIVEN = "test_given_answers_are_scored_like_drawn_ones"
EVALUATING = "tests/evaluation/test_evaluating.py"
BOOTSTRAP = "tests/evaluation/test_bootstrap.py"

MUTANTS = [
    Mutant(
        "evaluation: all problems share their chains' seeds",
        FOLDER + "questions.py",
        "np.random.SeedSequence([seed, problem]).generate_state(chains)",
        "np.random.SeedSequence([seed]).generate_state(chains)",
        (EVALUATING,),
    ),
    Mutant(
        "evaluation: end tokens end an answer that is given",
        "dms_jax/generation/engine.py",
        "end_tokens = () if source.given else engine.end_tokens",
        "end_tokens = engine.end_tokens",
        (f"{SCORE}::{GIVEN}",),
    ),
    Mutant(
        "evaluation: hyperscale, a resample has as many problems as there are",
        FOLDER + "bootstrap.py",
        "rng.multinomial(count - 1, np.full(count, 1 / count), size=draws) / (count - 1)",
        "rng.multinomial(count, np.full(count, 1 / count), size=draws) / count",
        (BOOTSTRAP,),
    ),
    Mutant(
        "sandbox: calls that are not on the list are allowed",
        FOLDER + "confined.py",
        "steps.append((_RETURN, 0, 0, _EPERM))",
        "steps.append((_RETURN, 0, 0, _ALLOW))",
        (f"{SANDBOX}::test_escapes_fail[mode]",),
    ),
    Mutant(
        "sandbox: it runs with what the system has",
        FOLDER + "confined.py",
        'if missing and not job["weaker"]:',
        "if False:",
        (SANDBOX,),
    ),
    Mutant(
        "chat: the next turn does not continue the tokens of the answer",
        "dms_jax/command_line/chat.py",
        "tokens = [*prompt, *completion.tokens]",
        "tokens = prompt",
        ("tests/command_line/test_chat.py",),
    ),
]
