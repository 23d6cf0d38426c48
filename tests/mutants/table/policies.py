"""Mistakes in `dms_jax/policies`.

Left out, because they change nothing: H2O's mean over the group as a sum (it ranks alike), and
KeyDiff's anchor without the division by the length (it is normalised afterwards).
"""

from tests.laws.rows import layer_law
from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/policies/"
FLOAT32 = "tests/policies/test_float32_sums.py"
ALLOCATION = "tests/policies/test_allocation.py"
OBSERVING = "tests/policies/test_observing.py"
DELAYED = "tests/policies/test_delayed_eviction.py"

MUTANTS = [
    Mutant(
        "policies: DMC's sums at inference in the model's type",
        FOLDER + "merging.py",
        "entries, 2 * shape.head_dim + 1), shape.wide)",
        "entries, 2 * shape.head_dim + 1), shape.dtype)",
        (f"{FLOAT32}::test_400_merged_tokens_are_their_mean",),
    ),
    Mutant(
        "policies: H2O's sums in the model's type",
        FOLDER + "h2o.py",
        "sums=jnp.zeros(shape.pages, shape.wide)",
        "sums=jnp.zeros(shape.pages, shape.dtype)",
        (f"{FLOAT32}::test_h2o_adds_up_600_queries",),
    ),
    Mutant(
        "policies: AdaKV without its safeguard",
        FOLDER + "allocation.py",
        "scores = jnp.where(highest(scores, own) & (scores > -jnp.inf), jnp.inf, scores)",
        "del own",
        (f"{ALLOCATION}::test_heads_compete_beyond_their_guarantee",),
    ),
    Mutant(
        "policies: PyramidKV with every layer high but the last",
        FOLDER + "allocation.py",
        "fall = -(-chunk.tokens.layer * (high - low) // (num_layers - 1))",
        "fall = jnp.where(chunk.tokens.layer == num_layers - 1, high - low, 0)",
        (f"{ALLOCATION}::test_a_pyramid_by_hand",),
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
        "policies: SnapKV's queries of a prompt see one slot more",
        FOLDER + "snapkv.py",
        "positions = jnp.maximum(slots - 1 - age, -1)",
        "positions = jnp.maximum(slots - age, -1)",
        ("tests/policies/test_observing.py",),
    ),
    Mutant(
        "policies: the first token of a DMC sequence merges into nothing",
        FOLDER + "dmc.py",
        "marks=(logits > 0) & (tokens.positions > 0)[:, None],",
        "marks=logits > 0,",
        ("tests/policies/test_merging.py",),
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
        "policies: random draws are the same in every layer",
        FOLDER + "draws.py",
        "mix(layer.astype(jnp.uint32) + 1)",
        "mix(0 * layer.astype(jnp.uint32) + 1)",
        (f"{DELAYED}::test_random_eviction_draws_by_layer_head_position",),
    ),
    Mutant(
        "policies: Quest's bounds cover slots that are not in use",
        FOLDER + "quest.py",
        "live = (slot < placement.lengths[..., None, None])[..., None]",
        "live = (slot <= placement.lengths[..., None, None])[..., None]",
        (f"{OBSERVING}::test_quest_bounds_are_those_of_the_keys_on_each_page",),
    ),
    Mutant(
        "policies: importance counts queries that see the key in any case",
        FOLDER + "importance.py",
        "later = seen & (at[:, None] - keys > seen_as.window)",
        "later = seen & (at[:, None] - keys >= seen_as.window)",
        ("tests/policies/test_importance.py",),
    ),
]
