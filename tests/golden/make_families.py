"""Tiny random models of every served family, with the logits that transformers gives them.

Run in an environment with PyTorch (CPU) and transformers 5; the project itself needs neither:

    python tests/golden/make_families.py [name ...]

Writes families/<name>/{config.json, model*.safetensors, expected.safetensors}. `expected` holds,
for four ways of presenting tokens, `<way>.tokens` and `<way>.logits` in float32 with:

    plain   [2, 40] whole sequences
    left    padded on the left, `left.mask` is 1 on real tokens
    right   padded on the right, `right.mask` likewise
    packed  several documents in a row, `packed.segments` numbers them from 1, 0 is padding

Positions count from the first real token of a sequence or document. Logits at padding are zero and
must not be compared.
"""

import json
import pathlib
import shutil
import sys

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from safetensors.torch import save_file as torch_save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

HERE = pathlib.Path(__file__).parent / "families"
VOCAB = 61
LENGTH = 40

BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN_MSCALE = YARN | {
    "mscale": 1.5,
    "mscale_all_dim": 0.5,
    "beta_fast": 16,
    "beta_slow": 2,
    "truncate": False,
}

# name: (family, changes to the base config, largest shard)
FAMILIES = {
    "llama2": ("Llama", {"num_key_value_heads": 4, "rms_norm_eps": 1e-5}, None),
    "llama_linear": (
        "Llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
        None,
    ),
    "llama31": ("Llama", {"rope_parameters": LLAMA3, "rms_norm_eps": 1e-5}, None),
    "llama32_tied": ("Llama", {"rope_parameters": LLAMA3, "tie_word_embeddings": True}, None),
    "llama_biases": ("Llama", {"attention_bias": True, "mlp_bias": True}, None),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}, None),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}, None),
    "qwen25_yarn": ("Qwen2", {"rope_parameters": YARN}, None),
    "qwen25_yarn_mscale": ("Qwen2", {"rope_parameters": YARN_MSCALE}, None),
    "qwen3": ("Qwen3", {"head_dim": 10}, "30KB"),
    "qwen3_tied_biases": (
        "Qwen3",
        {"head_dim": 8, "tie_word_embeddings": True, "attention_bias": True},
        None,
    ),
    "mistral_window": ("Mistral", {"sliding_window": 7, "head_dim": 8}, None),
    "gemma2": (
        "Gemma2",
        {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "sliding_window": 7,
            "query_pre_attn_scalar": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
        None,
    ),
    "gemma3": (
        "Gemma3",
        {
            "num_hidden_layers": 8,
            "head_dim": 8,
            "sliding_window": 7,
            "query_pre_attn_scalar": 5,
            "sliding_window_pattern": 3,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 500.0, "factor": 4.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            },
        },
        None,
    ),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}, None),
    "olmo3": (
        "Olmo3",
        {
            "num_hidden_layers": 5,
            "sliding_window": 7,
            "rope_parameters": {
                "full_attention": YARN | {"rope_theta": 500.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
            },
        },
        None,
    ),
    "smollm3": (
        "SmolLM3",
        {"num_hidden_layers": 5, "no_rope_layer_interval": 3, "head_dim": 6},
        None,
    ),
    "phi3": ("Phi3", {"sliding_window": 9}, None),
    "phi4": ("Phi3", {"sliding_window": None, "tie_word_embeddings": True}, None),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "norm_topk_prob": True,
        },
        None,
    ),
    "qwen3_moe_unnormalized": (
        "Qwen3Moe",
        {
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 8,
            "norm_topk_prob": False,
        },
        None,
    ),
    "gpt_oss": (
        "GptOss",
        {
            "num_hidden_layers": 3,
            "head_dim": 8,
            "sliding_window": 7,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "intermediate_size": 12,
            "rope_parameters": YARN | {"truncate": False},
        },
        None,
    ),
    "gpt_oss_mxfp4": (
        "GptOss",
        {
            "hidden_size": 32,
            "head_dim": 8,
            "sliding_window": 7,
            "num_local_experts": 3,
            "num_experts_per_tok": 2,
            "intermediate_size": 32,
            "rope_parameters": YARN | {"truncate": False},
        },
        None,
    ),
}


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights large enough that every part of the model shows in the logits."""
    offset = 0 if model.config.model_type.startswith("gemma") else 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("norm.weight"):
                parameter.copy_(offset + 0.3 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif name.endswith("sinks"):
                parameter.copy_(1 + noise)
            elif "embed_tokens" in name:
                parameter.copy_(0.5 * noise)
            else:
                parameter.copy_(1.2 * noise / parameter.shape[1] ** 0.5)


def masks(config, segments: torch.Tensor):
    """The masks of full and of sliding layers, as the model takes them."""
    same = (segments[:, :, None] == segments[:, None, :]) & (segments > 0)[:, None, :]
    causal = torch.tril(torch.ones(same.shape[1:], dtype=torch.bool))

    def mask(allowed):
        lowest = torch.finfo(torch.float32).min
        return torch.zeros(allowed.shape).masked_fill(~allowed, lowest)[:, None]

    full = mask(same & causal)
    window = getattr(config, "sliding_window", None)
    if window is None:
        return full
    sliding = mask(same & causal & torch.triu(causal | True, 1 - window))
    if hasattr(config, "layer_types") and config.layer_types:
        return {"full_attention": full, "sliding_attention": sliding}
    return sliding


def run(model, tokens, segments, *, four_dimensional: bool):
    """Logits with attention within a segment (0 is padding), positions counted within it."""
    tokens, segments = torch.tensor(tokens), torch.tensor(segments)
    positions = torch.zeros_like(tokens)
    for row, ids in enumerate(segments.tolist()):
        seen: dict[int, int] = {}
        for column, segment in enumerate(ids):
            positions[row, column] = seen.get(segment, 0)
            seen[segment] = seen.get(segment, 0) + 1
    mask = masks(model.config, segments) if four_dimensional else (segments > 0).long()
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=mask, position_ids=positions).logits
    return (logits * (segments > 0)[..., None]).numpy()


def pack(model: torch.nn.Module, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Experts in random MXFP4, which the model takes as transformers reads them; returns them."""
    packed = {}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = parameter.shape
            shape = (experts, outputs, inputs // 32, 16)
            blocks = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
            scales = torch.randint(123, 126, shape[:-1], generator=generator, dtype=torch.uint8)
            packed |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            with torch.no_grad():
                parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=torch.float32))
    return packed


def main() -> None:
    chosen = sys.argv[1:] or list(FAMILIES)
    for index, (name, (family, changes, shard)) in enumerate(FAMILIES.items()):
        if name not in chosen:
            continue
        kind = "Gemma3Text" if family == "Gemma3" else family
        config = getattr(transformers, f"{kind}Config")(**(BASE | changes))
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        randomise(model, torch.Generator().manual_seed(index))
        folder = HERE / name
        shutil.rmtree(folder, ignore_errors=True)
        if name.endswith("mxfp4"):
            packed = pack(model, torch.Generator().manual_seed(index))
            state = {x: y for x, y in model.state_dict().items() if f"{x}_blocks" not in packed}
            folder.mkdir()
            torch_save_file(state | packed, folder / "model.safetensors", {"format": "pt"})
            fields = model.config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
            fields |= {"architectures": ["GptOssForCausalLM"]}
            (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")
        else:
            model.save_pretrained(folder, **({"max_shard_size": shard} if shard else {}))
        (folder / "generation_config.json").unlink(missing_ok=True)

        rng = np.random.default_rng(index)
        tokens = rng.integers(3, VOCAB, (2, LENGTH))
        whole = np.ones_like(tokens)
        left = (np.arange(LENGTH) >= np.array([[13], [0]])).astype(np.int64)
        right = (np.arange(LENGTH) < np.array([[27], [40]])).astype(np.int64)
        packed = np.array([[1] * 11 + [2] * 17 + [3] * 12, [1] * 30 + [2] * 6 + [0] * 4])
        expected = {
            "plain.tokens": tokens,
            "plain.logits": run(model, tokens, whole, four_dimensional=False),
        }
        for way, segments in (("left", left), ("right", right), ("packed", packed)):
            padded = np.where(segments > 0, tokens, 0)
            expected[f"{way}.tokens"] = padded
            expected[f"{way}.segments" if way == "packed" else f"{way}.mask"] = segments
            expected[f"{way}.logits"] = run(
                model, padded, segments, four_dimensional=way == "packed"
            )
        expected = {
            key: np.ascontiguousarray(value.astype(np.float32 if "logits" in key else np.int32))
            for key, value in expected.items()
        }
        save_file(expected, folder / "expected.safetensors")
        spread = expected["plain.logits"].std()
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(json.dumps({"name": name, "logit_std": round(float(spread), 3), "bytes": size}))


if __name__ == "__main__":
    main()
