"""Mistakes in the traced numbers of policies."""

from tests.mutants.mutant import Mutant

BASE = "dms_jax/policies/base.py"
BUDGET = "dms_jax/policies/budget.py"
QUEST = "dms_jax/policies/quest.py"
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
        "traced numbers: what stands for a number is its bound",
        BASE,
        "if isinstance(value, int) and value:",
        "if isinstance(value, int):",
        (f"{TESTS}::test_bounds_follow_their_fields",),
    ),
    Mutant(
        "traced numbers: each budget has a page table of its own size",
        BASE,
        "return few_sizes(value)",
        "return value",
        (f"{TESTS}::test_options_selecting_code_are_static",),
    ),
    Mutant(
        "traced numbers: static fields come back in the order of their names",
        BASE,
        "policy.__dict__.update(zip(static, fixed, strict=True)",
        "policy.__dict__.update(zip(sorted(static), fixed, strict=True)",
        (f"{TESTS}::test_policy_survives_flattening",),
    ),
    Mutant(
        "traced numbers: those of a policy inside another one are static",
        BASE,
        "if (mark := traced(kind)) is not None or is_policy:",
        "if (mark := traced(kind)) is not None:",
        (f"{TESTS}::test_leaves_are_the_numbers[Quest]",),
    ),
    Mutant(
        "traced numbers: a ratio is rounded down for programs",
        BUDGET,
        "np.uint32(_reciprocal(ratio))",
        "np.uint32(2**31 / ratio)",
        (f"{TESTS}::test_programs_and_host_round_shares_equally",),
    ),
    Mutant(
        "traced numbers: Quest has one spare column too few",
        QUEST,
        "spare = score.shape[-1], bound // 3 + 1",
        "spare = score.shape[-1], bound // 3",
        (f"{TESTS}::test_pages_within_bound_equal_a_sort",),
    ),
    Mutant(
        "traced numbers: page tables are as wide as each budget needs",
        "dms_jax/model/language_model.py",
        "width = min(few_sizes(pages), most)",
        "width = pages",
        (f"{TESTS}::test_similar_budgets_share_a_page_table_width",),
    ),
    Mutant(
        "traced numbers: programs of the engine take them from the host",
        "dms_jax/generation/runner.py",
        "self.traced_policy = jax.tree.map(self.everywhere, jax.device_put(policy))",
        "self.traced_policy = policy",
        ("tests/generation/test_mesh.py::test_answers_do_not_depend_on_mesh",),
    ),
]
