"""Model configs: released ones in both spellings, unsupported ones, and malformed ones."""

import dataclasses
import json
import math

import pytest

from dms_jax.config import Experts, LayerKind, ModelConfig, Rope
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
    "Mistral-7B-v0.1": {
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
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 32000,
    },
    "gemma-3-270m": {
        "architectures": ["Gemma3ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 640,
        "intermediate_size": 2048,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "max_position_embeddings": 32768,
        "model_type": "gemma3_text",
        "num_attention_heads": 4,
        "num_hidden_layers": 18,
        "num_key_value_heads": 1,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 512,
        "use_bidirectional_attention": False,
        "vocab_size": 262144,
    },
    "gemma-2-2b": {
        "architectures": ["Gemma2ForCausalLM"],
        "attention_bias": False,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "max_position_embeddings": 8192,
        "model_type": "gemma2",
        "num_attention_heads": 8,
        "num_hidden_layers": 26,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "sliding_window": 4096,
        "vocab_size": 256000,
    },
    "Olmo-3-7B": {
        "architectures": ["Olmo3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8,
        "max_position_embeddings": 65536,
        "model_type": "olmo3",
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {
            "attention_factor": 1.2079441541679836,
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "yarn",
        },
        "rope_theta": 500000,
        "sliding_window": 4096,
        "tie_word_embeddings": False,
        "vocab_size": 100278,
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"],
        "attention_bias": False,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "layer_types": ["full_attention"] * 36,
        "max_position_embeddings": 65536,
        "max_window_layers": 28,
        "mlp_bias": False,
        "model_type": "smollm3",
        "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9,
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_theta": 5000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
        "vocab_size": 128256,
    },
    "phi-4": {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_act": "silu",
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "max_position_embeddings": 16384,
        "model_type": "phi3",
        "num_attention_heads": 40,
        "num_hidden_layers": 40,
        "num_key_value_heads": 10,
        "original_max_position_embeddings": 16384,
        "rms_norm_eps": 1e-05,
        "rope_scaling": None,
        "rope_theta": 250000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "vocab_size": 151936,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "experts_per_token": 4,
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 2880,
        "initial_context_length": 4096,
        "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "max_position_embeddings": 131072,
        "model_type": "gpt_oss",
        "num_attention_heads": 64,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
        "rms_norm_eps": 1e-05,
        "rope_scaling": {
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "rope_type": "yarn",
            "truncate": False,
        },
        "rope_theta": 150000,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
        "vocab_size": 201088,
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


def test_layer_types_are_the_shortest_group():
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
    "latent attention": ({"model_type": "deepseek_v3"}, r"\(MLA\)"),
    "recurrent layers": ({"model_type": "qwen3_next"}, "recurrent state"),
    "sparse attention": ({"model_type": "deepseek_v4"}, "sparse attention"),
    "shared keys": ({"model_type": "gemma4"}, "shares keys and values"),
    "images": ({"model_type": "qwen2_vl"}, "reads images"),
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
        "Attention to later tokens",
    ),
    "Phi's longrope": (
        {"model_type": "phi3", "rope_scaling": {"rope_type": "su"}},
        "'su'",
    ),
    "Phi's yarn": ({"model_type": "phi3", "rope_scaling": YARN}, "'longrope'"),
    "window of layers of SmolLM3": (
        {"model_type": "smollm3", "layer_types": ["full_attention", "sliding_attention"]},
        "Layer 1",
    ),
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
