"""Mistakes in a layer's attention over the cache, and in the cuts after it."""

from tests.laws.rows import layer_law
from tests.mutants.mutant import Mutant

ATTENTION = "dms_jax/model/cached_attention.py"
CUTTING = "dms_jax/model/cutting.py"
POLICIES = "dms_jax/policies/"
LOOP = "dms_jax/model/layer_loop.py"
WINDOWS = "tests/laws/test_windows.py"
EXPERTS = "tests/model/test_experts.py"
BALANCE = "tests/training/test_experts.py"
GROUPED = "tests/pallas_kernels/grouped/test_grouped.py"

MUTANTS = [
    Mutant(
        "layers: token by token, what is live is counted after the cut",
        ATTENTION,
        "return (cache, lengths), (out[:, 0], live, reads)",
        "return (cache, lengths), (out[:, 0], in_use(lengths, one.count)[:, 0], reads)",
        (layer_law("PyramidKV-"),),
    ),
    Mutant(
        "layers: token by token, a chunk runs one token more",
        ATTENTION,
        "count=(index < chunk.count).astype(chunk.count.dtype),",
        "count=(index <= chunk.count).astype(chunk.count.dtype),",
        (layer_law("TOVA-budget=8-prefill=evict_past_budget"),),
    ),
    Mutant(
        "layers: a lane that takes no part in a step reads",
        ATTENTION,
        "reads=None if reads is None else jnp.where(active, reads, 0)[:, None],",
        "reads=None if reads is None else reads[:, None],",
        (layer_law("Quest-budget=8-dense_layers=0-over"),),
    ),
    Mutant(
        "layers: a step weighs slots that it has not read",
        ATTENTION,
        "weights = jnp.exp(jnp.where(attended, scores - lse[..., None], -jnp.inf))",
        "weights = jnp.exp(scores - lse[..., None]) + ~attended",
        (layer_law("H2O-compression_ratio=2.4-"),),
    ),
    Mutant(
        "layers: a cut takes in what is not due",
        CUTTING,
        "keep = rows.live & (keep | ~which[:, None, None])",
        "keep = rows.live & keep",
        (layer_law("PyramidKV-"),),
    ),
    Mutant(
        "layers: rows are cut while their prompt is being read",
        CUTTING,
        "    due &= chunk.count > 0\n    reads",
        "    reads",
        (layer_law("ExpectedAttention-budget=11-"),),
    ),
    Mutant(
        "layers: rows of all layers are cut like those of the first",
        CUTTING,
        "layer=jnp.minimum(place[0], num_layers - 1)),",
        "layer=0 * place[0]),",
        (layer_law("RandomSelection-"),),
    ),
    Mutant(
        "layers: what a cut reads again is what it leaves",
        CUTTING,
        "    reads = jnp.where(due, lengths.sum(-1), 0).sum(0, dtype=jnp.int32)\n",
        "    reads = jnp.where(due, policy.layer_budget(chunk)[:, 0], 0).sum(0, dtype=jnp.int32)\n",
        (layer_law("Knorm-"),),
    ),
    Mutant(
        "layers: rows of a layer are due when the longest is full",
        POLICIES + "periodic_eviction.py",
        "total, heads = lengths.sum(1), lengths.shape[1]",
        "total, heads = lengths.max(1), 1",
        (layer_law("AdaKV-alpha=0.5-"),),
    ),
    Mutant(
        "layers: a chunk sees an earlier key for one query too long",
        POLICIES + "delayed_eviction.py",
        "until = jnp.where(marked & exists, age - 1, FOREVER)",
        "until = jnp.where(marked & exists, age, FOREVER)",
        (layer_law("DMS-window=0-"),),
    ),
    Mutant(
        "layers: Quest counts the last page where it lies behind the selected ones",
        POLICIES + "quest.py",
        "has_last = (last & (jnp.arange(selected) < count[..., None])).any(-1)",
        "has_last = last.any(-1)",
        (
            "tests/policies/test_observing.py"
            "::test_quest_counts_the_last_page_only_where_it_is_selected",
        ),
    ),
    Mutant(
        "layers: Quest updates the bounds of a chunk's last pages alone",
        POLICIES + "quest.py",
        "written = column * size < placement.lengths[..., None]",
        "written = (column * size < placement.lengths[..., None]) & (\n"
        "                column >= chunk.lengths[..., None] // size\n"
        "            )",
        ("tests/policies/test_observing.py::test_quest_bounds_are_those_of_the_keys_on_each_page",),
    ),
    Mutant(
        "layers: StreamingLLM with a ratio reuses slots inside a prompt that is cut",
        POLICIES + "streaming.py",
        "& (not chunk.static.one_pass)",
        "& True",
        ("tests/policies/test_observing.py::test_ratio_window_appends_and_cuts_later_prompt",),
    ),
    Mutant(
        "layers: StreamingLLM cuts a prompt to its most recent tokens, without the sinks",
        POLICIES + "streaming.py",
        "worth = jnp.where(positions < self.sinks, jnp.inf, positions)",
        "worth = positions.astype(rows.k.dtype)",
        (layer_law("StreamingLLM-compression_ratio=2.7-"),),
    ),
    Mutant(
        "layers: StreamingLLM with a ratio cuts prompts although their tokens run one by one",
        POLICIES + "streaming.py",
        "return self.compression_ratio is not None and super().shrinks",
        "return self.compression_ratio is not None",
        ("tests/policies/test_policies.py::test_prefill_of_each_policy",),
    ),
    Mutant(
        "layers: KCache never scales the weights of what it fetches",
        POLICIES + "kcache.py",
        "fetch = Fetch(self.top, renormalize=self.renormalize)",
        "fetch = Fetch(self.top)",
        (layer_law("KCache-top=3-"),),
    ),
    Mutant(
        "layers: a query of a sliding layer sees one token more than its window",
        LOOP,
        "return StreamingLLM(budget=config.window, sinks=0)",
        "return StreamingLLM(budget=config.window + 1, sinks=0)",
        (f"{WINDOWS}::test_one_pass_over_whole_sequences",),
    ),
    Mutant(
        "layers: sliding layers rotate as the others do",
        "dms_jax/config.py",
        '"sliding": LayerKind(self.window, self.local_rope or self.rope),',
        '"sliding": LayerKind(self.window, self.rope),',
        (f"{WINDOWS}::test_one_pass_over_whole_sequences",),
    ),
    Mutant(
        "layers: the last layers, which are no whole group, run one by one",
        LOOP,
        "size = min(period, len(each) - start)",
        "size = min(period, len(each) - start) if start == 0 else 1",
        ("tests/model/test_layer_loop.py::test_the_loop_runs_over_the_shortest_group_of_kinds",),
    ),
    Mutant(
        "layers: prefixes of a model with windows share pages that are written again",
        "dms_jax/generation/runner.py",
        "return self.policy.appends and self.model.config.window is None",
        "return self.policy.appends",
        (f"{WINDOWS}::test_cached_prefix_equals_full_prefill",),
    ),
    Mutant(
        "layers: experts are weighed by their logits",
        "dms_jax/model/layers.py",
        "return jax.nn.softmax(best, axis=-1), chosen",
        "return best, chosen",
        ("tests/model/test_parity.py::test_logits_equal_those_of_transformers[gpt_oss]",),
    ),
    Mutant(
        "layers: every shard of an expert adds the bias of its outputs",
        "dms_jax/model/layers.py",
        "down = down._replace(bias=jnp.where(first, down.bias, 0))",
        "down = down._replace(bias=jnp.where(first, down.bias, down.bias))",
        (f"{EXPERTS}::test_a_mesh_changes_no_result",),
    ),
    Mutant(
        "layers: every shard computes the first experts",
        "dms_jax/model/layers.py",
        "chosen = chosen - jax.lax.axis_index(experts_over) * len(down.kernel)",
        "chosen = chosen % len(down.kernel)",
        (f"{EXPERTS}::test_a_mesh_changes_no_result",),
    ),
    Mutant(
        "layers: experts that a token does not go to are multiplied by 0",
        "dms_jax/model/layers.py",
        "hidden = jnp.where(chosen.any(1)[..., None], weights[..., None] * hidden, 0)",
        "hidden = (weights[..., None] * hidden)",
        (f"{EXPERTS}::test_overflow_in_one_expert_spares_other_tokens",),
    ),
    Mutant(
        "layers: a step of a few tokens reads every expert",
        "dms_jax/model/layers.py",
        "if few and math.prod(chosen.shape) >= len(down.kernel):",
        "if few:",
        (f"{EXPERTS}::test_only_steps_of_few_sequences_compute_every_expert",),
    ),
    Mutant(
        "layers: a step transposes the matrices of all experts",
        "dms_jax/model/layers.py",
        '"XNE,XEF->XNF",\n        jnp.broadcast_to(x, (count, *x.shape)),',
        '"NE,XEF->XNF",\n        x,',
        (f"{EXPERTS}::test_step_reads_expert_matrices_in_place",),
    ),
    Mutant(
        "layers: padding counts in the balance of routers",
        "dms_jax/model/transformer.py",
        "counted = of_own_tokens(row, segment_ids) > 0",
        "counted = of_own_tokens(row, segment_ids) >= 0",
        (f"{BALANCE}::test_padding_counts_in_no_balance",),
    ),
    Mutant(
        "layers: a block of rows of a group ends the group before its last one",
        "pallas_kernels/grouped/reference.py",
        "blocks = -(-counts // size)",
        "blocks = counts // size",
        (f"{GROUPED}::test_products_and_gradients",),
    ),
]
