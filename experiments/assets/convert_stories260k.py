"""Convert a llama2.c checkpoint (v0 `.bin` and sentencepiece model) to a Hugging Face directory.

    python -m experiments.assets.convert_stories260k --weights stories260K.bin \
        --tokenizer tok512.model --license LICENSE --out dms_jax/assets/stories260k

The `.bin` holds seven int32 (dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len),
then float32 tensors stacked over the layers: embedding, attention norm, wq, wk, wv, wo,
feed-forward norm, w1 (gate), w2 (down), w3 (up), final norm, two rotary tables. The output matrix
is the embedding unless vocab_size is negative.

llama2.c rotates neighbouring dims (2i, 2i + 1) where Hugging Face rotates (i, i + D/2), so the
rows of wq and wk are put in another order; scores, being sums over dims, stay the same.
"""

import dataclasses
import json
import pathlib
import struct
import sys

import numpy as np
from safetensors.numpy import save_file

import dms_jax
from dms_jax.checkpoint import Tokenizer
from dms_jax.command_line.reports import make_folder, read_file
from dms_jax.command_line.running import run
from dms_jax.config import ModelConfig

CARD = """# stories260K

A Llama of 260,032 parameters trained on TinyStories: 5 layers, width 64, 8 query and 4 KV heads of
8 dims, feed-forward 172, vocabulary 512, context 512, tied embeddings. It is real, and small
enough for every test.

- From: `karpathy/tinyllamas` (stories260K), converted by
  `experiments/assets/convert_stories260k.py`.
- Licence: MIT, see LICENSE.
- A sequence begins with `<s>` (id 1), which also separates stories: generation ends at it.
- Loss about 1.27 nats a token over single stories, each read from `<s>`.
"""


@dataclasses.dataclass(frozen=True)
class Config:
    """Files to read and the directory to write."""

    weights: pathlib.Path
    """Checkpoint of llama2.c to read, version 0 (.bin)."""
    tokenizer: pathlib.Path
    """Model file of sentencepiece to read (.model)."""
    license: pathlib.Path
    """Licence text to put beside the result."""
    out: pathlib.Path = pathlib.Path("runs/stories260k-converted")
    """Hugging Face directory to write."""


def read(path: pathlib.Path) -> tuple[ModelConfig, dict[str, np.ndarray]]:
    """Read a v0 `.bin`: the config, and tensors under Hugging Face's names."""
    data = read_file("--weights", path)
    if len(data) < 28:
        raise dms_jax.CheckpointError(f"{path} is no llama2.c checkpoint: it has {len(data)} bytes")
    width, hidden, layers, heads, kv_heads, vocab, length = struct.unpack_from("<7i", data)
    tied, vocab = vocab > 0, abs(vocab)
    head_dim = width // heads
    values = np.frombuffer(data, np.float32, offset=28)
    position = 0

    def take(*shape: int) -> np.ndarray:
        nonlocal position
        size = int(np.prod(shape))
        position += size
        return values[position - size : position].reshape(shape)

    def half_split(weight: np.ndarray, count: int) -> np.ndarray:
        # In: rows 0 1 2 3 of a head  # Out: rows 0 2 1 3
        pairs = weight.reshape(layers, count, head_dim // 2, 2, width)
        return pairs.swapaxes(2, 3).reshape(weight.shape)

    embedding = take(vocab, width)
    stacked = {
        "input_layernorm": take(layers, width),
        "self_attn.q_proj": half_split(take(layers, heads * head_dim, width), heads),
        "self_attn.k_proj": half_split(take(layers, kv_heads * head_dim, width), kv_heads),
        "self_attn.v_proj": take(layers, kv_heads * head_dim, width),
        "self_attn.o_proj": take(layers, width, heads * head_dim),
        "post_attention_layernorm": take(layers, width),
        "mlp.gate_proj": take(layers, hidden, width),
        "mlp.down_proj": take(layers, width, hidden),
        "mlp.up_proj": take(layers, hidden, width),
    }
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": take(width)}
    take(2, length, head_dim // 2)  # rotary tables
    if not tied:
        tensors["lm_head.weight"] = take(vocab, width)
    if position != len(values):
        raise dms_jax.CheckpointError(
            f"{path} has {len(values)} floats where its header asks for {position}"
        )
    for name, stack in stacked.items():
        for layer in range(layers):
            tensors[f"model.layers.{layer}.{name}.weight"] = stack[layer]
    config = ModelConfig(
        vocab_size=vocab,
        hidden_size=width,
        intermediate_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=length,
        rms_norm_eps=1e-5,
        tie_embeddings=tied,
    )
    return config, tensors


def main(config: Config) -> None:
    """Write the Hugging Face directory."""
    make_folder("--out", config.out)
    shape, tensors = read(config.weights)
    contiguous = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    save_file(contiguous, config.out / "model.safetensors", metadata={"format": "pt"})

    ends = {"bos_token_id": 1, "eos_token_id": 2}
    write_json(config.out / "config.json", shape.to_hf() | {"torch_dtype": "float32"} | ends)
    # A story ends where the next begins, so the model's end token in practice is the first one.
    write_json(config.out / "generation_config.json", ends | {"eos_token_id": [1, 2]})

    (config.out / "tokenizer.model").write_bytes(read_file("--tokenizer", config.tokenizer))
    tokenizer = Tokenizer.from_directory(config.out)
    (config.out / "tokenizer.model").unlink()
    assert tokenizer is not None
    tokenizer.save(config.out)
    (config.out / "LICENSE").write_bytes(read_file("--license", config.license))
    (config.out / "README.md").write_text(CARD, encoding="utf-8")


def write_json(path: pathlib.Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
