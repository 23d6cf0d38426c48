"""Mistakes in launches that run ahead of collected results, in `dms_jax/generation`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/generation/"
OVERLAP = "tests/generation/test_overlap.py"

MUTANTS = [
    Mutant(
        "generation: the next steps wait until the end of an answer is told",
        FOLDER + "engine.py",
        "not self._is_open and source.on_tokens is not None",
        "not self._is_open",
        (f"{OVERLAP}::test_ends_are_told_while_the_next_steps_run",),
    ),
    Mutant(
        "generation: a call that is left early leaves its steps to the next one",
        FOLDER + "engine.py",
        "if call.unfinished:  # the caller",
        "if False:  # the caller",
        ("tests/generation/test_calls.py::test_abandoned_call_leaves_nothing_behind",),
    ),
    Mutant(
        "generation: the device is idle between two chunks of a closed list",
        FOLDER + "engine.py",
        "elif scheduler.cancelled:",
        "else:",
        (f"{OVERLAP}::test_chunk_is_launched_before_last_is_collected",),
    ),
]
