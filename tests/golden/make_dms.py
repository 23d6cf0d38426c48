"""Tiny random checkpoints of NVIDIA's two DMS forms, with decisions and logits by hand.

Needs NumPy and safetensors only:

    python tests/golden/make_dms.py

Writes dms/<form>/{config.json, model.safetensors, expected.safetensors}, where form is

    query_neuron   the form of nvidia/Qwen3-8B-DMS-8x: plain Qwen3 tensors, `dms_window_size` and
                   `dms_cr` in the config, decisions borrowed from a query neuron
    adapter        the form that NVIDIA's recipe trains: `dms_separate_alpha` and two more tensors
                   a layer, decisions from the residual stream
    adapter_layer  the same with `dms_alpha_per` "layer" and its own scale, offset and window

`expected` holds, worked out in float64 from the published semantics and written independently of
the library: `tokens` [B, T], `eviction_logits` and `decisions` [L, B, K, T] (1 is evict), `visible`
[L, B, K, T, T] (which key a query sees), and the model's output `logits` [B, T, V].

    a_t = raw_t * scale - offset,  d_t = 1[a_t > 0]
    key k is visible to query q  iff  k <= q and (q - k <= window or d_{k+1} = 0)

Seeds are chosen so that no a_t is nearer to zero than MARGIN: float32 decides the same.
"""

import json
import pathlib

import numpy as np
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent / "dms"
B, T = 2, 26
VOCAB, WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 61, 24, 36, 2, 6, 3, 8
GROUP = HEADS // KV_HEADS
EPSILON, THETA = 1e-6, 1e6
MARGIN = 0.02

BASE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": EPSILON,
    "rope_theta": THETA,
    "rope_scaling": None,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": LAYERS,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FORMS = {
    "query_neuron": {
        "auto_map": {
            "AutoConfig": "configuration_qwen3_dms.Qwen3Config",
            "AutoModelForCausalLM": "modeling_qwen3_dms.Qwen3ForCausalLM",
        },
        "dms_window_size": 5,
        "dms_cr": 8,
    },
    "adapter": {
        "dms_window_size": 4,
        "dms_separate_alpha": True,
        "dms_alpha_scale": 100.0,
        "dms_initial_alpha_offset": 5.0,
        "dms_alpha_per": "head",
        "dms_tau": 0.1,
        "dms_paged_attention_block_size": 256,
        "dms_cr": 8,
    },
    "adapter_layer": {
        "dms_window_size": 3,
        "dms_separate_alpha": True,
        "dms_alpha_scale": 10.0,
        "dms_initial_alpha_offset": 1.0,
        "dms_alpha_per": "layer",
        "dms_tau": 0.2,
    },
}


def make_tensors(rng: np.random.Generator, *, adapter: bool) -> dict[str, np.ndarray]:
    def matrix(rows: int, columns: int) -> np.ndarray:
        return 1.2 * rng.standard_normal((rows, columns)) / columns**0.5

    def norm(size: int) -> np.ndarray:
        return 1 + 0.3 * rng.standard_normal(size)

    tensors = {
        "model.embed_tokens.weight": 0.5 * rng.standard_normal((VOCAB, WIDTH)),
        "model.norm.weight": norm(WIDTH),
        "lm_head.weight": matrix(VOCAB, WIDTH),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        tensors |= {
            at + "input_layernorm.weight": norm(WIDTH),
            at + "post_attention_layernorm.weight": norm(WIDTH),
            at + "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, WIDTH),
            at + "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, WIDTH),
            at + "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, WIDTH),
            at + "self_attn.o_proj.weight": matrix(WIDTH, HEADS * HEAD_DIM),
            at + "self_attn.q_norm.weight": norm(HEAD_DIM),
            at + "self_attn.k_norm.weight": norm(HEAD_DIM),
            at + "mlp.gate_proj.weight": matrix(HIDDEN, WIDTH),
            at + "mlp.up_proj.weight": matrix(HIDDEN, WIDTH),
            at + "mlp.down_proj.weight": matrix(WIDTH, HIDDEN),
        }
        if adapter:
            tensors[at + "self_attn.dms_proj_alpha_norm.weight"] = norm(WIDTH)
            tensors[at + "self_attn.dms_proj_alpha.weight"] = matrix(KV_HEADS, WIDTH)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def rms_norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * scale


def rotate(x: np.ndarray) -> np.ndarray:
    """Rotary positions 0, 1, ... of x [T, heads, D], dim i paired with i + D/2."""
    half = HEAD_DIM // 2
    angles = np.arange(T)[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def forward(tensors: dict[str, np.ndarray], form: dict, tokens: np.ndarray) -> dict:
    """One sequence [T] through the model with hard decisions, query by query."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    separate = form.get("dms_separate_alpha", False)
    scale = form.get("dms_alpha_scale", 100.0)
    offset = form.get("dms_initial_alpha_offset", 5.0)
    window = form["dms_window_size"]
    x = w["model.embed_tokens.weight"][tokens]
    eviction_logits, decisions, visible = [], [], []
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        normed = rms_norm(x, w[at + "input_layernorm.weight"])
        q = (normed @ w[at + "self_attn.q_proj.weight"].T).reshape(T, HEADS, HEAD_DIM)
        k = (normed @ w[at + "self_attn.k_proj.weight"].T).reshape(T, KV_HEADS, HEAD_DIM)
        v = (normed @ w[at + "self_attn.v_proj.weight"].T).reshape(T, KV_HEADS, HEAD_DIM)
        q = rms_norm(q, w[at + "self_attn.q_norm.weight"])
        k = rms_norm(k, w[at + "self_attn.k_norm.weight"])
        if separate:  # from the residual stream, before the input norm
            raw = rms_norm(x, w[at + "self_attn.dms_proj_alpha_norm.weight"])
            raw = raw @ w[at + "self_attn.dms_proj_alpha.weight"].T
        else:  # last dim of the first query head of each group, after the norm, before rotation
            raw = q[:, ::GROUP, -1].copy()
            q[:, ::GROUP, -1] = 0
        q, k = rotate(q), rotate(k)
        if not separate:
            q[:, ::GROUP, -1] = 0
        a = (raw * scale - offset).T  # [K, T]
        d = (a > 0).astype(np.int64)
        if form.get("dms_alpha_per", "head") == "layer":
            a, d = np.tile(a[:1], (KV_HEADS, 1)), np.tile(d[:1], (KV_HEADS, 1))
        seen = np.zeros((KV_HEADS, T, T), np.int64)
        attended = np.zeros((T, HEADS, HEAD_DIM))
        for head in range(HEADS):
            kv = head // GROUP
            for query in range(T):
                keys = [
                    key for key in range(query + 1) if query - key <= window or d[kv, key + 1] == 0
                ]
                seen[kv, query, keys] = 1
                scores = k[keys, kv] @ q[query, head] / HEAD_DIM**0.5
                weights = np.exp(scores - scores.max())
                attended[query, head] = weights / weights.sum() @ v[keys, kv]
        x = x + attended.reshape(T, -1) @ w[at + "self_attn.o_proj.weight"].T
        normed = rms_norm(x, w[at + "post_attention_layernorm.weight"])
        gate = normed @ w[at + "mlp.gate_proj.weight"].T
        up = normed @ w[at + "mlp.up_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[at + "mlp.down_proj.weight"].T
        eviction_logits.append(a)
        decisions.append(d)
        visible.append(seen)
    logits = rms_norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    return {
        "eviction_logits": np.stack(eviction_logits),
        "decisions": np.stack(decisions),
        "visible": np.stack(visible),
        "logits": logits,
    }


def main() -> None:
    for name, form in FORMS.items():
        for seed in range(1000):
            rng = np.random.default_rng(seed)
            tensors = make_tensors(rng, adapter=form.get("dms_separate_alpha", False))
            tokens = rng.integers(3, VOCAB, (B, T))
            rows = [forward(tensors, form, row) for row in tokens]
            expected = {
                "tokens": tokens.astype(np.int32),
                "logits": np.stack([row["logits"] for row in rows]),
                "eviction_logits": np.stack([row["eviction_logits"] for row in rows], 1),
                "decisions": np.stack([row["decisions"] for row in rows], 1).astype(np.int8),
                "visible": np.stack([row["visible"] for row in rows], 1).astype(np.int8),
            }
            if np.abs(expected["eviction_logits"]).min() > MARGIN:
                break
        folder = HERE / name
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(BASE | form, indent=2) + "\n")
        # safetensors writes the bytes as they lie, so they must lie in order.
        contiguous = {key: np.ascontiguousarray(value) for key, value in expected.items()}
        save_file(contiguous, folder / "expected.safetensors")
        evicted = float(expected["decisions"].mean())
        reads = int(expected["visible"].sum())
        print(f"{name}: seed {seed}, {evicted:.2f} evicted, {reads} reads")


if __name__ == "__main__":
    main()
