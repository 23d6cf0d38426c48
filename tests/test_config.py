"""Model configs: released ones in both spellings, unsupported ones, and malformed ones."""

import dataclasses
import json
import pathlib

import pytest

from dms_jax.config import Experts, LayerKind, ModelConfig, Rope
from dms_jax.errors import ConfigError

# The fields that matter of released config.json files, as published (transformers 4 spelling).
RELEASED = json.loads((pathlib.Path(__file__).parent / "golden/released_configs.json").read_text())
SMALL = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
SMALL_512 = SMALL | {"max_position_embeddings": 512}
YARN_512 = {"factor": 4.0, "original_max_position_embeddings": 512}


def transformers_5_spelling(config: dict) -> dict:
    """Returns the same config with rope_parameters and dtype."""
    config = dict(config)
    rope = {"rope_type": "default"} | (config.pop("rope_scaling", None) or {})
    rope["rope_theta"] = config.pop("rope_theta", 10000.0)
    return config | {"rope_parameters": rope, "dtype": config.pop("torch_dtype", "bfloat16")}


def test_llama_32_field_by_field():
    assert ModelConfig.from_hf(RELEASED["Llama-3.2-1B-Instruct"]) == ModelConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        head_dim=64,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        rope=Rope(
            theta=500000.0,
            kind="llama3",
            factor=32.0,
            original_max_position_embeddings=8192,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
        ),
        tie_embeddings=True,
        model_type="llama",
    )


def test_switches_of_each_family():
    llama2, qwen2, qwen3, mistral = (
        ModelConfig.from_hf(RELEASED[name])
        for name in ("Llama-2-7b", "Qwen2.5-1.5B", "Qwen3-8B", "Mistral-7B-v0.3")
    )
    assert (llama2.head_dim, llama2.group_size, llama2.rope) == (128, 1, Rope())
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.qk_norm) == (True, False, False)
    assert (qwen2.head_dim, qwen2.group_size) == (128, 6)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert (mistral.qkv_bias, mistral.rope.theta) == (False, 1e6)


def test_layers_of_each_family():
    found = {name: ModelConfig.from_hf(fields) for name, fields in RELEASED.items()}
    gemma, gpt_oss = found["gemma-3-270m"], found["gpt-oss-20b"]
    assert gemma.kinds == (LayerKind(512, Rope()),) * 5 + (LayerKind(None, Rope(theta=1e6)),)
    assert (gemma.num_full_layers, gemma.windowed[:7]) == (3, (*[True] * 5, False, True))
    assert (gemma.norms, gemma.norm_offset, gemma.qk_norm) == ("both", True, True)
    assert (gemma.scaled_embedding, gemma.activation) == (True, "gelu_tanh")
    assert (gemma.attention_scale, gemma.score_scale, gemma.tie_embeddings) == (None, 1 / 16, True)
    gemma2 = found["gemma-2-2b"]
    assert (gemma2.attention_soft_cap, gemma2.logit_soft_cap, gemma2.qk_norm) == (50, 30, False)
    assert (gemma2.layer_types, gemma2.window) == (("sliding", "full"), 4096)
    assert (gpt_oss.layer_types, gpt_oss.window, gpt_oss.sinks) == (("sliding", "full"), 128, True)
    assert gpt_oss.experts == Experts(count=32, per_token=4)
    assert (gpt_oss.mlp_bias, gpt_oss.output_bias, gpt_oss.rope.truncate) == (True, True, False)
    qwen = found["Qwen3-30B-A3B"]
    assert (qwen.experts, qwen.intermediate_size) == (Experts(count=128, per_token=8), 768)
    assert (qwen.active_width, qwen.layer_types, qwen.qk_norm) == (8 * 768, ("full",), True)
    olmo = found["Olmo-3-7B"]
    assert [kind.window for kind in olmo.kinds] == [4096] * 3 + [None]
    assert [kind.rope.kind for kind in olmo.kinds] == ["default"] * 3 + ["yarn"]
    assert (olmo.norms, olmo.qk_norm_over) == ("post", "heads")
    smol = found["SmolLM3-3B"]
    assert [kind.rope is None for kind in smol.kinds] == [False, False, False, True]
    assert (smol.num_full_layers, smol.tie_embeddings) == (36, True)
    assert found["Mistral-7B-v0.1"].kinds == (LayerKind(4096, Rope()),)
    assert found["phi-4"].kinds == (LayerKind(None, Rope(theta=250_000)),)


def test_layer_types_reduce_to_the_shortest_group():
    small = ModelConfig.from_hf(SMALL)
    every = dict(num_layers=7, window=4)
    group = ("sliding", "full", "sliding")
    for given in (group, group * 2, (*group, *group, "sliding")):
        assert dataclasses.replace(small, layer_types=given, **every).layer_types == group
    with pytest.raises(ConfigError, match="sliding layers need a window"):
        dataclasses.replace(small, layer_types=("sliding",))
    with pytest.raises(ConfigError, match="others have none"):
        dataclasses.replace(small, window=4)
    with pytest.raises(ConfigError, match=r"per_token \(3\) exceeds their count \(2\)"):
        Experts(count=2, per_token=3)


@pytest.mark.parametrize("name", RELEASED)
def test_both_spellings_and_back(name):
    config = ModelConfig.from_hf(RELEASED[name])
    assert ModelConfig.from_hf(transformers_5_spelling(RELEASED[name])) == config
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config
    assert {config: name}[ModelConfig.from_hf(written)] == name  # hashable by value


def test_llama_and_qwen3_biases():
    llama = ModelConfig.from_hf(SMALL | {"attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = ModelConfig.from_hf(SMALL | {"model_type": "qwen3", "attention_bias": True})
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.head_dim) == (True, True, 128)


def test_missing_fields_have_defaults():
    llama = ModelConfig.from_hf(
        {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    )
    assert (llama.num_kv_heads, llama.rms_norm_eps, llama.tie_embeddings) == (4, 1e-6, False)
    mistral = ModelConfig.from_hf(
        SMALL | {"model_type": "mistral", "max_position_embeddings": 8192}
    )
    assert (mistral.window, mistral.layer_types) == (4096, ("sliding",))


def test_yarn_fields():
    rope = ModelConfig.from_hf(SMALL | {"rope_scaling": YARN}).rope
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (32.0, 1.0, None)
    without = {name: value for name, value in YARN.items() if name != "factor"}
    rope = ModelConfig.from_hf(SMALL | {"rope_scaling": without}).rope
    assert rope.factor == 128 / 32
    old = {"type": "yarn", "factor": 4.0}
    rope = ModelConfig.from_hf(SMALL | {"rope_scaling": old}).rope
    assert rope.original_max_position_embeddings == 128


def test_window_beyond_all_positions_is_supported():
    mistral = SMALL | {"model_type": "mistral", "sliding_window": 128}
    assert ModelConfig.from_hf(mistral).model_type == "mistral"
    qwen = SMALL | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
    assert ModelConfig.from_hf(qwen | {"max_window_layers": 2}).num_layers == 2


REFUSED = {
    "mixture of experts": ({"model_type": "mixtral"}, "'mixtral' is not supported"),
    "experts in a known family": ({"num_local_experts": 8}, "Mixture of experts"),
    "architecture": ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    "mismatch": ({"architectures": ["Qwen2ForCausalLM"]}, "does not belong"),
    "latent attention": ({"model_type": "deepseek_v3"}, "'deepseek_v3' is not supported"),
    "linear attention": (
        {"model_type": "olmo3", "layer_types": ["linear_attention", "full_attention"]},
        "Layer 0 has attention of type 'linear_attention'",
    ),
    "some dense layers": (
        {"model_type": "qwen3_moe", "mlp_only_layers": [0]},
        "either all layers have experts, or none",
    ),
    "every second layer": (
        {"model_type": "qwen3_moe", "decoder_sparse_step": 2},
        "either all layers have experts, or none",
    ),
    "another clamp": ({"model_type": "gpt_oss", "swiglu_limit": 5.0}, "swiglu_limit 5.0"),
    "later tokens": (
        {"model_type": "gemma3_text", "use_bidirectional_attention": True},
        "Bidirectional attention",
    ),
    "Phi's longrope": (
        {"model_type": "phi3", "rope_scaling": {"rope_type": "su"}},
        "'su'",
    ),
    "Phi's yarn": ({"model_type": "phi3", "rope_scaling": YARN}, "'longrope'"),
    "no family": ({"model_type": None}, "neither model_type nor architectures"),
    "window of Qwen": (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 1,
        },
        "Sliding-window",
    ),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "mrope": ({"rope_scaling": {"mrope_section": [1, 1]}}, "mrope_section"),
    "rope by layer": (
        {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "from layer to layer",
    ),
    "activation": ({"hidden_act": "gelu"}, "'gelu'"),
    "quantized": ({"quantization_config": {"bits": 4}}, "quantization_config"),
    "tensor parallel pretraining": ({"pretraining_tp": 2}, "pretraining_tp 2"),
    "two ropes": (
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        "disagree",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unsupported_models_are_refused_by_name(case):
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(SMALL | changes)


MALFORMED = {
    "missing": {"hidden_size": None},
    "text for a number": {"vocab_size": "many"},
    "huge": {"num_hidden_layers": 10**9},
    "heads do not divide": {"num_key_value_heads": 3},
    "odd head": {"head_dim": 3},
    "width does not divide": {"hidden_size": 18},
    "base of one": {"rope_theta": 1.0},
    "flag": {"tie_word_embeddings": "yes"},
    "rope is a list": {"rope_scaling": [1]},
    "no factor": {"rope_scaling": {"rope_type": "linear"}},
    "frequencies crossed": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 4.0,
            "high_freq_factor": 1.0,
        }
    },
    "rope kind is a list": {"rope_scaling": {"rope_type": ["yarn"]}},
    "architectures is a text": {"architectures": "LlamaForCausalLM"},
    "layer types is a text": {"layer_types": "full"},
    "long garbage": {"hidden_act": "x" * 10_000_000},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_fields_have_short_errors(case):
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_hf(SMALL | MALFORMED[case])
    assert len(str(refusal.value)) < 400


def test_to_hf_refuses_unsupported_switches():
    config = ModelConfig.from_hf(SMALL | {"model_type": "qwen2"})
    assert config.qkv_bias
    biased = ModelConfig(**{**vars(config), "model_type": "mistral"})
    with pytest.raises(ConfigError, match="cannot express"):
        biased.to_hf()


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        # Qwen2.5's card; Qwen3's, with more positions than the original ones; Vicuna's.
        (
            {"rope_scaling": {"type": "yarn", **YARN_512}},
            2048,
        ),
        (
            {"max_position_embeddings": 640, "rope_scaling": {"rope_type": "yarn", **YARN_512}},
            2048,
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 1280),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}}, 1024),
        # Positions that are raised already stay.
        (
            {"max_position_embeddings": 2048, "rope_scaling": {"rope_type": "yarn", **YARN_512}},
            2048,
        ),
        (
            {"max_position_embeddings": 4096, "rope_scaling": {"rope_type": "yarn", **YARN_512}},
            4096,
        ),
        # Llama 3.1 counts them.
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            512,
        ),
        ({"rope_scaling": {"type": "linear", "factor": 1.0}}, 512),
        ({"rope_scaling": None}, 512),
    ],
)
def test_scaled_ropes_add_positions(fields, positions):
    config = ModelConfig.from_hf(SMALL_512 | fields)
    assert config.max_position_embeddings == positions
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization_config": {}},
        {"quantization_config": None},
        {"rope_scaling": {}},
        {"model_type": "qwen2", "use_sliding_window": None},
        {"model_type": "qwen3", "use_sliding_window": None, "sliding_window": 4},
        {"rope_scaling": {"rope_type": "default", "mrope_section": []}},
        {"layer_types": None, "pretraining_tp": None, "num_experts": None, "hidden_act": None},
    ],
)
def test_empty_fields_are_accepted(fields):
    assert ModelConfig.from_hf(SMALL_512 | fields).max_position_embeddings == 512


def test_window_counts_if_yarn_positions_exceed_it():
    """A model of 512 positions never leaves its window of 512; one of 2048 does."""
    fields = {"model_type": "mistral", "sliding_window": 512}
    never = ModelConfig.from_hf(SMALL_512 | fields)
    assert (never.max_position_embeddings, never.window) == (512, None)
    yarn = {"type": "yarn", **YARN_512}
    assert ModelConfig.from_hf(SMALL_512 | fields | {"rope_scaling": yarn}).window == 512
