"""Model configs: released ones in both spellings, unsupported ones, and malformed ones."""

import json
import math

import pytest

from dms_jax.config import ModelConfig, Rope
from dms_jax.errors import ConfigError

# The fields that matter of released config.json files, as published (transformers 4 spelling).
RELEASED = {
    "Llama-2-7b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "max_position_embeddings": 4096,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "torch_dtype": "float16",
        "vocab_size": 32000,
    },
    "Llama-3.2-1B-Instruct": {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "max_position_embeddings": 131072,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": 32,
        "num_hidden_layers": 16,
        "num_key_value_heads": 8,
        "pretraining_tp": 1,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "factor": 32.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "Qwen2.5-1.5B": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "max_position_embeddings": 131072,
        "max_window_layers": 28,
        "model_type": "qwen2",
        "num_attention_heads": 12,
        "num_hidden_layers": 28,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 131072,
        "tie_word_embeddings": True,
        "use_mrope": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Qwen3-8B": {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 40960,
        "max_window_layers": 36,
        "model_type": "qwen3",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "Mistral-7B-v0.3": {
        "architectures": ["MistralForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 32768,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 32768,
    },
}
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


@pytest.mark.parametrize("name", RELEASED)
def test_both_spellings_and_back(name):
    config = ModelConfig.from_hf(RELEASED[name])
    assert ModelConfig.from_hf(transformers_5_spelling(RELEASED[name])) == config
    written = json.loads(json.dumps(config.to_hf()))
    assert ModelConfig.from_hf(written) == config
    assert {config: name}[ModelConfig.from_hf(written)] == name  # hashable by value


def test_biases_of_llama_and_qwen3():
    llama = ModelConfig.from_hf(SMALL | {"attention_bias": True, "mlp_bias": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    qwen3 = ModelConfig.from_hf(SMALL | {"model_type": "qwen3", "attention_bias": True})
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.head_dim) == (True, True, 128)


def test_silence_means_what_transformers_assumes():
    llama = ModelConfig.from_hf(
        {name: value for name, value in SMALL.items() if name != "num_key_value_heads"}
    )
    assert (llama.num_kv_heads, llama.rms_norm_eps, llama.tie_embeddings) == (4, 1e-6, False)
    with pytest.raises(ConfigError, match="sliding_window 4096"):
        ModelConfig.from_hf(SMALL | {"model_type": "mistral", "max_position_embeddings": 8192})


def test_yarn_fields():
    rope = ModelConfig.from_hf(SMALL | {"rope_scaling": YARN}).rope
    assert (rope.beta_fast, rope.beta_slow, rope.attention_factor) == (32.0, 1.0, None)
    without = {name: value for name, value in YARN.items() if name != "factor"}
    rope = ModelConfig.from_hf(SMALL | {"rope_scaling": without}).rope
    assert rope.factor == 128 / 32
    old = {"type": "yarn", "factor": 4.0}
    rope = ModelConfig.from_hf(SMALL | {"rope_scaling": old}).rope
    assert rope.original_max_position_embeddings == 128


def test_a_sliding_window_that_never_slides_is_supported():
    mistral = SMALL | {"model_type": "mistral", "sliding_window": 128}
    assert ModelConfig.from_hf(mistral).model_type == "mistral"
    qwen = SMALL | {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
    assert ModelConfig.from_hf(qwen | {"max_window_layers": 2}).num_layers == 2


REFUSED = {
    "mixture of experts": ({"model_type": "mixtral"}, "'mixtral' is not supported"),
    "experts in a known family": ({"num_local_experts": 8}, "Mixture of experts"),
    "architecture": ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM"),
    "head of another task": (
        {"architectures": ["LlamaForSequenceClassification"]},
        "LlamaForSequenceClassification",
    ),
    "mismatch": ({"architectures": ["Qwen2ForCausalLM"]}, "does not belong"),
    "no family": ({"model_type": None}, "neither model_type nor architectures"),
    "window": ({"model_type": "mistral", "sliding_window": 64}, "Sliding-window"),
    "window of Qwen": (
        {
            "model_type": "qwen2",
            "use_sliding_window": True,
            "sliding_window": 64,
            "max_window_layers": 1,
        },
        "Sliding-window",
    ),
    "layer types": ({"layer_types": ["full_attention", "sliding_attention"]}, "Layer 1"),
    "partial rotary": ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "dynamic": ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    "longrope": ({"rope_scaling": {"rope_type": "longrope"}}, "'longrope'"),
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
def test_what_is_not_supported_is_refused_by_name(case):
    changes, message = REFUSED[case]
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_hf(SMALL | changes)


MALFORMED = {
    "missing": {"hidden_size": None},
    "text for a number": {"vocab_size": "many"},
    "fraction": {"num_hidden_layers": 2.5},
    "boolean": {"num_attention_heads": True},
    "negative": {"intermediate_size": -20},
    "zero": {"num_key_value_heads": 0},
    "huge": {"num_hidden_layers": 10**9},
    "beyond printing": {"vocab_size": 10**5000},
    "heads do not divide": {"num_key_value_heads": 3},
    "odd head": {"head_dim": 3},
    "width does not divide": {"hidden_size": 18},
    "epsilon": {"rms_norm_eps": 0},
    "not a number": {"rms_norm_eps": math.nan},
    "infinite base": {"rope_theta": math.inf},
    "base of one": {"rope_theta": 1.0},
    "flag": {"tie_word_embeddings": "yes"},
    "rope is a list": {"rope_scaling": [1]},
    "no factor": {"rope_scaling": {"rope_type": "linear"}},
    "factor of zero": {"rope_scaling": {"rope_type": "linear", "factor": 0}},
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
    "model type is a list": {"model_type": ["llama"]},
    "layer types is a text": {"layer_types": "full"},
    "long garbage": {"hidden_act": "x" * 10_000_000},
}


@pytest.mark.parametrize("case", MALFORMED)
def test_garbage_is_refused_in_few_words(case):
    with pytest.raises(ConfigError) as refusal:
        ModelConfig.from_hf(SMALL | MALFORMED[case])
    assert len(str(refusal.value)) < 400


def test_what_a_family_cannot_express_is_not_written():
    config = ModelConfig.from_hf(SMALL | {"model_type": "qwen2"})
    assert config.qkv_bias
    biased = ModelConfig(**{**vars(config), "model_type": "mistral"})
    with pytest.raises(ConfigError, match="cannot express"):
        biased.to_hf()
