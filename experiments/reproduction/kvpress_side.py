"""The side of `kvpress_peer` that runs in kvpress's environment: kept tokens and answers.

It imports nothing of dms_jax. A press cuts each layer after it has attended to the whole prompt. So
a prompt is read once without a press, and every press then gets the arguments of its hook: the
layer, its input, keys, values and attention weights.
"""

import importlib.metadata
import json
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np


def main(folder: pathlib.Path) -> None:
    """Reads texts.json and model/ of a folder, and writes peer.npz and peer.json."""
    import kvpress  # pyright: ignore[reportMissingImports]
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    asked = json.loads((folder / "texts.json").read_text(encoding="utf-8"))
    arrays: dict[str, np.ndarray] = {}
    answers: dict[str, list[list[int]]] = {}
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float32
    ).eval()
    texts = torch.tensor(asked["texts"])
    for attention, given in (("sdpa", presses(kvpress)), ("eager", observed(kvpress))):
        model.set_attn_implementation(attention)
        with torch.inference_mode():
            calls, logits = read(model, texts)
            for name, make in given.items():
                for ratio in asked["ratios"]:
                    place = f"{name}/{ratio}"
                    scores, kept, cache = cut(make(ratio), calls)
                    arrays[f"scores/{place}"], arrays[f"kept/{place}"] = scores, kept
                    if name in asked["answered"] and ratio == asked["ratios"][0]:
                        answers[name] = answer(model, cache, logits, texts.shape[1], asked)
                    print(f"kvpress: {place}", flush=True)
    np.savez_compressed(folder / "peer.npz", **arrays)  # pyright: ignore[reportArgumentType]
    versions = {each: importlib.metadata.version(each) for each in ("kvpress", "transformers")}
    (folder / "peer.json").write_text(
        json.dumps({"versions": versions | {"torch": torch.__version__}, "answers": answers}),
        encoding="utf-8",
    )


def presses(kvpress: Any) -> dict[str, Callable[[float], Any]]:
    """Returns the compared presses, as functions of the removed share."""
    return {
        "SnapKV, window 32": lambda ratio: kvpress.SnapKVPress(ratio, window_size=32),
        "SnapKV, window 64": lambda ratio: kvpress.SnapKVPress(ratio, window_size=64),
        "AdaKV(SnapKV)": lambda ratio: kvpress.AdaKVPress(kvpress.SnapKVPress(ratio)),
        "ExpectedAttention": kvpress.ExpectedAttentionPress,
        "AdaKV(ExpectedAttention)": lambda ratio: kvpress.AdaKVPress(
            kvpress.ExpectedAttentionPress(ratio, epsilon=1e-2)
        ),
        "TOVA": kvpress.TOVAPress,
        "Knorm": kvpress.KnormPress,
        "KeyDiff": kvpress.KeyDiffPress,
        "StreamingLLM": kvpress.StreamingLLMPress,
    }


def observed(kvpress: Any) -> dict[str, Callable[[float], Any]]:
    """Returns the press that needs all attention weights."""
    return {"H2O": kvpress.ObservedAttentionPress}


def read(model: Any, texts: Any) -> tuple[list[tuple[Any, ...]], Any]:
    """Reads texts [B, T] of one length, without a press.

    Returns the arguments of `BasePress.compress` for every layer, and the last logits [B, V].
    """
    import transformers  # pyright: ignore[reportMissingImports]

    calls: list[tuple[Any, ...]] = []

    def hook(module: Any, _: Any, named: dict[str, Any], output: Any) -> None:
        layer = named["past_key_values"].layers[module.layer_idx]
        calls.append((module, named["hidden_states"], layer.keys, layer.values, output[1], named))

    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb  # like `BasePress.__call__`
        hooks.append(layer.self_attn.register_forward_hook(hook, with_kwargs=True))
    out = model(input_ids=texts, past_key_values=transformers.DynamicCache(), logits_to_keep=1)
    for each in hooks:
        each.remove()
    return calls, out.logits[:, -1]


def cut(press: Any, calls: list[tuple[Any, ...]]) -> tuple[np.ndarray, np.ndarray, Any]:
    """Returns the scores and the mask of a press, both [L, B, K, T], and the cut cache.

    A press does not report the kept keys, so they are looked up among its inputs; AdaKV reports
    masked keys.
    """
    import torch  # pyright: ignore[reportMissingImports]
    import transformers  # pyright: ignore[reportMissingImports]

    scores: list[np.ndarray] = []
    masks: list[np.ndarray] = []
    cache = transformers.DynamicCache()
    scorer = getattr(press, "press", press)
    score = scorer.score

    def scoring(*arguments: Any) -> Any:
        found = score(*arguments)
        scores.append(found.numpy().copy())  # AdaKV writes into them
        return found

    scorer.score = scoring
    for layer, (module, hidden, keys, values, attentions, named) in enumerate(calls):
        module.masked_key_indices = None
        left = press.compress(module, hidden, keys.clone(), values.clone(), attentions, named)
        cache.update(*left, layer)
        if module.masked_key_indices is None:
            rows = zip(keys.flatten(0, 1).numpy(), left[0].flatten(0, 1).numpy(), strict=True)
            masks.append(np.stack([find(*row) for row in rows]).reshape(keys.shape[:3]))
        else:
            mask = torch.ones(keys.shape[:3], dtype=torch.bool)
            mask[module.masked_key_indices] = False
            masks.append(mask.numpy())
    return np.stack(scores), np.stack(masks), cache


def find(keys: np.ndarray, left: np.ndarray) -> np.ndarray:
    """Returns which of the keys [T, D] are among the remaining ones [N, D]."""
    places = {key.tobytes(): place for place, key in enumerate(keys)}
    assert len(places) == len(keys), "two rotated keys of a row are equal"
    mask = np.zeros(len(keys), bool)
    mask[[places[key.tobytes()] for key in left]] = True
    return mask


def answer(
    model: Any, cache: Any, logits: Any, tokens: int, asked: dict[str, Any]
) -> list[list[int]]:
    """Returns the greedy answers after prompts of that many tokens, without the end tokens."""
    import torch  # pyright: ignore[reportMissingImports]

    said = logits.argmax(-1, keepdim=True)
    for position in range(tokens, tokens + asked["new_tokens"] - 1):
        logits = model(
            input_ids=said[:, -1:],
            past_key_values=cache,
            position_ids=torch.full((len(said), 1), position),
        ).logits[:, -1]
        said = torch.cat([said, logits.argmax(-1, keepdim=True)], -1)
    return [until(each, asked["end"]) for each in said.tolist()]


def until(tokens: list[int], end: list[int]) -> list[int]:
    """Returns the tokens before the first end token."""
    return tokens[: next((n for n, each in enumerate(tokens) if each in end), len(tokens))]
