"""Mistakes in `dms_jax/training`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/training/"
STEP = "tests/training/test_step.py"
CHECKPOINTS = "tests/training/test_checkpoints.py"
COUNTS = "tests/training/test_what_counts.py"
RETROFIT = "tests/training/test_retrofit.py"

MUTANTS = [
    Mutant(
        "training: the teacher is the moving student",
        FOLDER + "step.py",
        "original = jax.lax.stop_gradient(current | teacher)",
        "original = jax.lax.stop_gradient(current)",
        (f"{COUNTS}::test_teacher_is_fixed_and_uncounted_tokens_ignored",),
    ),
    Mutant(
        "training: every pass of a step has the same noise",
        FOLDER + "step.py",
        "noise_keys = jax.vmap(fold)(own_numbers)",
        "noise_keys = jax.vmap(fold)(jnp.arange(len(own_numbers)))",
        (f"{STEP}::test_every_pass_draws_its_own_noise",),
    ),
    Mutant(
        "training: the adapter is cast for the passes",
        FOLDER + "parameters.py",
        "return {name: x if is_adapter(name) else x.astype(dtype) for name, x in arrays.items()}",
        "return {name: x.astype(dtype) for name, x in arrays.items()}",
        ("tests/training/test_parameters.py::test_adapter_stays_float32_in_passes",),
    ),
    Mutant(
        "training: the neurons are zeroed before their last step of decay",
        FOLDER + "loop.py",
        "before = recipe.progress(step - 1, policy) if step else None",
        "before = recipe.progress(step, policy) if step else None",
        (f"{RETROFIT}::test_the_borrowed_neuron_decays_and_is_zeroed",),
    ),
    Mutant(
        "checkpoints: those that the divergence has spoilt stay",
        FOLDER + "loop.py",
        "self._directory.discard(step - self._skipped_in_a_row)",
        "self._directory.discard(step)",
        (f"{CHECKPOINTS}::test_checkpoints_followed_only_by_nan_are_dropped",),
    ),
    Mutant(
        "streams: a row takes the stream of its place among the rows of its process",
        "dms_jax/data/batches.py",
        "for row in self._assignment.rows]\n        self._first",
        "for row in range(len(self._assignment.rows))]\n        self._first",
        ("tests/data/test_batches.py::test_rows_do_not_depend_on_the_processes",),
    ),
    Mutant(
        "processes: an array that was read leaves a copy on the host",
        "dms_jax/processes.py",
        "return jax.device_get(again)",
        "return jax.device_get(value)",
        ("tests/training/test_processes.py::test_reading_an_array_leaves_no_copy_on_the_host",),
    ),
]
