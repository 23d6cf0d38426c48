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
        "policies: of equal scores the earlier token stays",
        FOLDER + "budget.py",
        """    ascending = jnp.argsort(scores, axis=-1, stable=True)
    rank = jnp.argsort(ascending, axis=-1)
    return rank >= scores.shape[-1] - count[..., None]""",
        """    descending = jnp.argsort(-scores, axis=-1, stable=True)
    rank = jnp.argsort(descending, axis=-1)
    return rank < count[..., None]""",
        (f"{ALLOCATION}::HighestTest",),
    ),
    Mutant(
        "policies: a share that is whole is rounded below itself",
        FOLDER + "budget.py",
        "return math.ceil(2**31 / compression_ratio)",
        "return math.floor(2**31 / compression_ratio)",
        (f"{ALLOCATION}::test_shares_round_down_and_exact_ones_stay",),
    ),
    Mutant(
        "policies: attention weights without the maximum taken off",
        FOLDER + "victims.py",
        "weights = jnp.exp(scores - jnp.maximum(scores.max(-1, keepdims=True), -1e30))",
        "weights = jnp.exp(scores)",
        (f"{FLOAT32}::test_the_weights_of_a_query",),
    ),
    Mutant(
        "policies: queries that see nothing give every slot the same",
        "pallas_kernels/received/reference.py",
        "jnp.where(visible, weights, 0).sum((2, 3))",
        "weights.sum((2, 3))",
        (f"{FLOAT32}::test_h2o_adds_up_a_dense_prompt_without_its_padding",),
    ),
    Mutant(
        "policies: H2O counts the queries of padding",
        FOLDER + "h2o.py",
        "at = jnp.where(chunk.valid[:, 0], chunk.tokens.positions, -1)",
        "at = chunk.tokens.positions",
        (f"{FLOAT32}::test_h2o_adds_up_a_dense_prompt_without_its_padding",),
    ),
    Mutant(
        "policies: H2O adds a page's former owner's sums",
        FOLDER + "h2o.py",
        "sums=put_slots(received.sums, chunk.page_table, placement.slots, 0),",
        "sums=received.sums,",
        (layer_law("H2O-budget=7-"),),
    ),
    Mutant(
        "policies: H2O's recent tokens are the smaller half",
        FOLDER + "h2o.py",
        "recent = budget - budget // 2",
        "recent = budget // 2",
        (layer_law("H2O-budget=7-"),),
    ),
    Mutant(
        "policies: the newest token of a cut is one too late",
        FOLDER + "values.py",
        "return self.first + jnp.maximum(self.count, 1) - 1",
        "return self.first + jnp.maximum(self.count, 1)",
        (layer_law("H2O-compression_ratio=2.4-"),),
    ),
    Mutant(
        "policies: R-KV holds the last of alike keys to be redundant",
        FOLDER + "rkv.py",
        "jnp.where(column == last, 0, cosine)",
        "cosine",
        (layer_law("RKV-budget=9-"),),
    ),
    Mutant(
        "policies: R-KV's attention is that of all keys",
        FOLDER + "rkv.py",
        "logits = jnp.where(old[:, :, None], logits.max(3), -1e30)",
        "logits = logits.max(3)",
        (layer_law("RKV-budget=9-"),),
    ),
    Mutant(
        "policies: TriAttention looks one position too near",
        FOLDER + "triattention.py",
        "angles = (1 + distances)",
        "angles = distances",
        (layer_law("TriAttention-budget=9-"),),
    ),
    Mutant(
        "policies: TriAttention's centres are of the last chunk alone",
        FOLDER + "triattention.py",
        "total = jnp.maximum(seen + chunk.count",
        "total = jnp.maximum(0 * seen + chunk.count",
        (layer_law("TriAttention-budget=9-"),),
    ),
    Mutant(
        "policies: a prompt that must stay is one token shorter",
        FOLDER + "periodic_eviction.py",
        "read = jnp.where(chunk.count > 0, chunk.newest + 1, prompt[:, 0])",
        "read = jnp.where(chunk.count > 0, chunk.newest, prompt[:, 0])",
        (layer_law("TriAttention-budget=9-"),),
    ),
    Mutant(
        "policies: ExpectedAttention counts the tokens that always stay",
        FOLDER + "expected_attention.py",
        "counted = rows.live & ~kept",
        "counted = rows.live",
        (layer_law("ExpectedAttention-budget=11-"),),
    ),
    Mutant(
        "policies: SnapKV's ring loses its oldest query",
        FOLDER + "recent_queries.py",
        "size = min(q.shape[1], window)",
        "size = min(q.shape[1], max(window - 1, 1))",
        (layer_law("SnapKV-budget=9-"),),
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
        "policies: DMS's logits in the model's type",
        FOLDER + "dms.py",
        "raw = raw.astype(jnp.promote_types(raw.dtype, jnp.float32))",
        "pass",
        (f"{FLOAT32}::test_dms_decides_by_the_exact_logit",),
    ),
    Mutant(
        "policies: DMC's decisions and importance in the model's type",
        FOLDER + "dmc.py",
        "wide = jnp.promote_types(k.dtype, jnp.float32)",
        "wide = k.dtype",
        (f"{FLOAT32}::test_dmc_weighs_by_the_exact_mean_of_the_group",),
    ),
    Mutant(
        "policies: the first token of a DMC sequence merges into nothing",
        FOLDER + "dmc.py",
        "marks=(logits > 0) & (tokens.positions > 0)[:, None],",
        "marks=logits > 0,",
        ("tests/policies/test_merging.py",),
    ),
    Mutant(
        "policies: a merged window keeps entries of the segment before",
        FOLDER + "merging.py",
        "kept = jnp.where(after[..., None] > 0, 0, kept)",
        "kept = jnp.where(after[..., None] > 1, 0, kept)",
        (layer_law("DMC-window=3-"),),
    ),
    Mutant(
        "policies: the candidate that leaves the window comes one token late",
        FOLDER + "delayed_eviction.py",
        "has_candidate = (first + index >= size)[:, None]",
        "has_candidate = (first + index > size)[:, None]",
        (layer_law("DMS-window=4-source=adapter-"),),
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
        "policies: rows are cut one token late",
        FOLDER + "periodic_eviction.py",
        "return total >= heads * tokens",
        "return total > heads * tokens",
        (layer_law("KeyDiff-"),),
    ),
    Mutant(
        "policies: rows over a mesh are cut when a device's own are full",
        FOLDER + "periodic_eviction.py",
        "total, heads = jax.lax.psum((total, heads), chunk.static.head_axis)",
        "pass",
        (f"{ALLOCATION}::test_rows_of_a_layer_are_due_together_on_any_mesh",),
    ),
    Mutant(
        "policies: random selection draws the same at every cut",
        FOLDER + "random_selection.py",
        "when = mix(newest.astype(jnp.uint32) + jnp.uint32(0x9E3779B9))[:, None, None]",
        "when = mix(0 * newest.astype(jnp.uint32) + jnp.uint32(0x9E3779B9))[:, None, None]",
        (f"{ALLOCATION}::test_random_draws_differ_by_layer_head_and_cut",),
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
        "policies: Quest's scores summed in the model's type",
        FOLDER + "quest.py",
        "preferred_element_type=jnp.promote_types(q.dtype, jnp.float32),",
        "preferred_element_type=q.dtype,",
        (f"{FLOAT32}::test_quest_bounds_are_compared_in_float32",),
    ),
    Mutant(
        "policies: KVpop without what is said as a token leaves the window",
        FOLDER + "kvpop.py",
        "_score(jnp.take_along_axis(own, index, axis=-1), late)",
        "_score(jnp.take_along_axis(own, index, axis=-1), 0 * late)",
        (layer_law("KVpop-budget=8-"),),
    ),
    Mutant(
        "policies: KVpop gives up a token that the next query is to see",
        FOLDER + "kvpop.py",
        "leaves = (place >= 0) & (pushed_by < chunk.count[:, None, None])",
        "leaves = (place >= 0) & (pushed_by <= chunk.count[:, None, None])",
        (layer_law("KVpop-budget=8-"),),
    ),
    Mutant(
        "policies: importance counts queries that see the key in any case",
        FOLDER + "importance.py",
        "later = seen & (at[:, None] - keys > seen_as.window)",
        "later = seen & (at[:, None] - keys >= seen_as.window)",
        ("tests/policies/test_importance.py",),
    ),
]
