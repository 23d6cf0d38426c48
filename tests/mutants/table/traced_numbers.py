"""Mistakes in the traced numbers of policies."""

from tests.mutants.mutant import Mutant

BASE = "dms_jax/policies/base.py"
TESTS = "tests/policies/test_traced_numbers.py"

MUTANTS = [
    Mutant(
        "traced numbers: seeds from 2**31 on do not fit",
        "dms_jax/policies/dms.py",
        "seed: Annotated[Seed, Traced(np.uint32)] = 0",
        "seed: Annotated[Seed, Traced(int)] = 0",
        (f"{TESTS}::test_the_largest_numbers_fit_in_32_bits",),
    ),
    Mutant(
        "traced numbers: a bound is kept when its number is replaced",
        BASE,
        "{k: v for k, v in bounds.items() if k not in changes}",
        "bounds",
        (f"{TESTS}::test_bounds_follow_their_fields",),
    ),
    Mutant(
        "traced numbers: programs of the engine take them from the host",
        "dms_jax/generation/runner.py",
        "self.traced_policy = jax.tree.map(self.everywhere, jax.device_put(policy))",
        "self.traced_policy = policy",
        ("tests/generation/test_mesh.py::test_answers_do_not_depend_on_mesh",),
    ),
]
