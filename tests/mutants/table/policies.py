"""Mistakes in `dms_jax/policies`.

Left out, because they change nothing: H2O's mean over the group as a sum (it ranks alike), and
KeyDiff's anchor without the division by the length (it is normalised afterwards).
"""

from tests.laws.rows import layer_law
from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/policies/"
FLOAT32 = "tests/policies/test_float32_sums.py"
ALLOCATION = "tests/policies/test_allocation.py"

MUTANTS = [
    Mutant(
        "policies: DMC's sums at inference in the model's type",
        FOLDER + "merging.py",
        "entries, 2 * shape.head_dim + 1), shape.wide)",
        "entries, 2 * shape.head_dim + 1), shape.dtype)",
        (f"{FLOAT32}::test_400_merged_tokens_are_their_mean",),
    ),
    Mutant(
        "policies: AdaKV without its safeguard",
        FOLDER + "allocation.py",
        "scores = jnp.where(highest(scores, own) & (scores > -jnp.inf), jnp.inf, scores)",
        "del own",
        (f"{ALLOCATION}::test_heads_compete_beyond_their_guarantee",),
    ),
    Mutant(
        "policies: H2O adds a page's former owner's sums",
        FOLDER + "h2o.py",
        "sums=put_slots(received.sums, chunk.page_table, placement.slots, 0),",
        "sums=received.sums,",
        (layer_law("H2O-budget=7-"),),
    ),
    Mutant(
        "layers: decision logits of a step lose their bias",
        "dms_jax/model/layers.py",
        "y += projection.bias[...].astype(x.dtype)",
        "y += 0 * projection.bias[...].astype(x.dtype)",
        ("tests/laws/test_prompt_and_steps.py", "tests/model/test_transformer.py"),
    ),
    Mutant(
        "policies: a token that leaves within its chunk has the slot of the one that follows it",
        FOLDER + "delayed_eviction.py",
        "slots=jnp.where(valid & ~gone, slots, NOT_STORED),",
        "slots=jnp.where(valid, slots, NOT_STORED),",
        (
            "tests/policies/test_delayed_eviction.py::test_slots_lengths_and_visibility_equal_the_ring",
        ),
    ),
    Mutant(
        "traced numbers: a bound is kept when its number is replaced",
        FOLDER + "base.py",
        "{k: v for k, v in bounds.items() if k not in changes}",
        "bounds",
        ("tests/policies/test_traced_numbers.py::test_bounds_follow_their_fields",),
    ),
]
