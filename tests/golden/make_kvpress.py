"""Makes kvpress.safetensors: scores of one attention layer by kvpress, the published library.

Ran with kvpress 0.5.5 (its modules behind an empty `__init__`), torch 2.13.0 and transformers
5.23.0 on a CPU:

    PYTHONPATH=<directory that holds kvpress> python make_kvpress.py

Everything is float64. Of one random Llama layer it holds q [T, H, D] and k, v [T, K, D] before
rotation, and `score.<name>` [K, T]; `kept.adakv` [K, T] marks what AdaKV leaves of SnapKV's scores.
"""

import pathlib

import torch
from kvpress.presses.adakv_press import AdaKVPress
from kvpress.presses.expected_attention_press import ExpectedAttentionPress
from kvpress.presses.keydiff_press import KeyDiffPress
from kvpress.presses.knorm_press import KnormPress
from kvpress.presses.snapkv_press import SnapKVPress
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

TOKENS, HEADS, KV_HEADS, DIM, THETA = 40, 4, 2, 8, 100.0


def main() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    config = LlamaConfig(
        hidden_size=24,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=DIM,
        vocab_size=64,
        rope_parameters=dict(rope_type="default", rope_theta=THETA),
    )
    config._attn_implementation = "sdpa"
    model = LlamaForCausalLM(config).double()
    layer = model.model.layers[0].self_attn
    layer.rotary_emb = model.model.rotary_emb
    hidden = 12 * torch.randn(1, TOKENS, config.hidden_size)
    # Sizes that make attention uneven.
    for projection in (layer.q_proj, layer.k_proj):
        projection.weight.data *= 2.5

    def heads(projection, count):
        return projection(hidden).view(1, TOKENS, count, DIM).transpose(1, 2)

    q, k, v = (
        heads(layer.q_proj, HEADS),
        heads(layer.k_proj, KV_HEADS),
        heads(layer.v_proj, KV_HEADS),
    )
    cos, sin = model.model.rotary_emb(hidden, torch.arange(TOKENS)[None])
    _, rotated = apply_rotary_pos_emb(q, k, cos, sin)
    presses = {
        "knorm": KnormPress(0.5),
        "keydiff": KeyDiffPress(0.5),
        "snapkv": SnapKVPress(0.5, window_size=8, kernel_size=5),
        "expected": ExpectedAttentionPress(0.5, n_future_positions=16, epsilon=0.01),
        "expected_mean": ExpectedAttentionPress(0.5, n_future_positions=16, use_covariance=False),
    }
    arguments = (layer, hidden, rotated, v, None, {"position_embeddings": (cos, sin)})
    tensors = {"q": q[0].transpose(0, 1), "k": k[0].transpose(0, 1), "v": v[0].transpose(0, 1)}
    for name, press in presses.items():
        tensors[f"score.{name}"] = press.score(*arguments)[0]
    AdaKVPress(presses["snapkv"], alpha_safeguard=0.2).compress(*arguments)
    _, head, slot = layer.masked_key_indices
    kept = torch.ones(KV_HEADS, TOKENS, dtype=torch.bool)
    kept[head, slot] = False
    tensors["kept.adakv"] = kept
    tensors = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, pathlib.Path(__file__).with_name("kvpress.safetensors"))


if __name__ == "__main__":
    main()
