"""The llama2.c converter, on a made-up checkpoint whose rotation is done llama2.c's way."""

import shutil
import struct

import chex
import numpy as np
import pytest

from dms_jax import CheckpointError
from dms_jax.checkpoint import load
from experiments.assets.convert_stories260k import Config, main, read
from tests.checkpoint.support import GOLDEN

WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, LENGTH = 24, 20, 2, 4, 2, 512, 9
HEAD_DIM = WIDTH // HEADS


@pytest.fixture
def arrays() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    kv = KV_HEADS * HEAD_DIM
    shapes = {
        "embedding": (VOCAB, WIDTH),
        "attention_norm": (LAYERS, WIDTH),
        "wq": (LAYERS, WIDTH, WIDTH),
        "wk": (LAYERS, kv, WIDTH),
        "wv": (LAYERS, kv, WIDTH),
        "wo": (LAYERS, WIDTH, WIDTH),
        "ffn_norm": (LAYERS, WIDTH),
        "w1": (LAYERS, HIDDEN, WIDTH),
        "w2": (LAYERS, WIDTH, HIDDEN),
        "w3": (LAYERS, HIDDEN, WIDTH),
        "final_norm": (WIDTH,),
        "rotary": (2, LENGTH, HEAD_DIM // 2),
        "output": (VOCAB, WIDTH),
    }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


def write(path, arrays, *, tied: bool) -> None:
    vocab = VOCAB if tied else -VOCAB
    header = struct.pack("<7i", WIDTH, HIDDEN, LAYERS, HEADS, KV_HEADS, vocab, LENGTH)
    used = [array for name, array in arrays.items() if not (tied and name == "output")]
    path.write_bytes(header + b"".join(array.tobytes() for array in used))


def logits_llama2c(arrays, tokens) -> np.ndarray:
    """The model as llama2.c runs it, neighbouring dims rotated together."""
    w = {name: array.astype(np.float64) for name, array in arrays.items()}

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * scale

    def rotate(x):
        angles = np.arange(len(tokens))[:, None] * 1e4 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        turned = (x[..., 0::2] + 1j * x[..., 1::2]) * np.exp(1j * angles)[:, None]
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    x = w["embedding"][tokens]
    causal = np.tril(np.ones((len(tokens), len(tokens)), bool))
    for i in range(LAYERS):
        h = norm(x, w["attention_norm"][i])
        q = rotate((h @ w["wq"][i].T).reshape(-1, HEADS, HEAD_DIM))
        k = rotate((h @ w["wk"][i].T).reshape(-1, KV_HEADS, HEAD_DIM))
        v = (h @ w["wv"][i].T).reshape(-1, KV_HEADS, HEAD_DIM)
        k, v = (np.repeat(y, HEADS // KV_HEADS, axis=1) for y in (k, v))
        scores = np.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        weights = np.where(causal, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        weights /= weights.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weights, v).reshape(x.shape) @ w["wo"][i].T
        h = norm(x, w["ffn_norm"][i])
        gate = h @ w["w1"][i].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["w3"][i].T)) @ w["w2"][i].T
    return norm(x, w["final_norm"]) @ w["output"].T


@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_llama2c(arrays, tmp_path, tied):
    if tied:
        arrays["output"] = arrays["embedding"]
    write(tmp_path / "model.bin", arrays, tied=tied)
    (tmp_path / "LICENSE").write_text("a licence")
    shutil.copy(GOLDEN / "tokenizers" / "stories260k" / "tokenizer.model", tmp_path)
    out = tmp_path / "out"
    main(
        Config(
            weights=tmp_path / "model.bin",
            tokenizer=tmp_path / "tokenizer.model",
            license=tmp_path / "LICENSE",
            out=out,
        )
    )
    model = load(out)
    assert (model.transformer.lm_head is None) == tied
    assert model.tokenizer.bos_token_id == 1
    assert (out / "LICENSE").read_text() == "a licence"
    tokens = np.random.default_rng(1).integers(0, VOCAB, LENGTH)
    expected = logits_llama2c(arrays, tokens)
    chex.assert_trees_all_close(
        np.asarray(model.logits(tokens[None]))[0], expected, rtol=1e-7, atol=2e-4
    )


def test_a_file_that_does_not_fit_its_header(arrays, tmp_path):
    write(tmp_path / "model.bin", arrays, tied=True)
    with (tmp_path / "model.bin").open("ab") as file:
        file.write(b"\0" * 8)
    with pytest.raises(CheckpointError, match="floats where its header asks for"):
        read(tmp_path / "model.bin")
