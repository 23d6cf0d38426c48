"""Mistakes in a layer's attention over the cache, and in the cuts after it."""

from tests.mutants.mutant import Mutant

POLICIES = "dms_jax/policies/"
LOOP = "dms_jax/model/layer_loop.py"
WINDOWS = "tests/laws/test_windows.py"
EXPERTS = "tests/model/test_experts.py"

MUTANTS = [
    Mutant(
        "layers: StreamingLLM with a ratio cuts prompts although their tokens run one by one",
        POLICIES + "streaming.py",
        "return self.compression_ratio is not None and super().shrinks",
        "return self.compression_ratio is not None",
        ("tests/policies/test_policies.py::test_prefill_of_each_policy",),
    ),
    Mutant(
        "layers: the last layers, which are no whole group, run one by one",
        LOOP,
        "size = min(period, len(each) - start)",
        "size = min(period, len(each) - start) if start == 0 else 1",
        ("tests/model/test_layer_loop.py::test_loop_runs_over_shortest_group",),
    ),
    Mutant(
        "layers: prefixes of a model with windows share pages that are written again",
        "dms_jax/generation/runner.py",
        "return self.policy.appends and self.model.config.window is None",
        "return self.policy.appends",
        (f"{WINDOWS}::test_cached_prefix_equals_full_prefill",),
    ),
    Mutant(
        "layers: every shard of an expert adds the bias of its outputs",
        "dms_jax/model/layers.py",
        "down = down._replace(bias=jnp.where(first, down.bias, 0))",
        "down = down._replace(bias=jnp.where(first, down.bias, down.bias))",
        (f"{EXPERTS}::test_a_mesh_changes_no_result",),
    ),
    Mutant(
        "layers: experts that a token does not go to are multiplied by 0",
        "dms_jax/model/layers.py",
        "hidden = jnp.where(chosen.any(1)[..., None], weights[..., None] * hidden, 0)",
        "hidden = (weights[..., None] * hidden)",
        (f"{EXPERTS}::test_overflow_in_one_expert_spares_other_tokens",),
    ),
]
