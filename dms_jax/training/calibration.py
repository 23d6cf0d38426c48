"""Calibrate policies on text without training: thresholds, and the centres of queries."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
from safetensors.numpy import save_file

from dms_jax.checks import Ratio, check
from dms_jax.data.batches import check_batch, check_batch_list
from dms_jax.devices import fits_device
from dms_jax.errors import ConfigError, DataError
from dms_jax.model.attention import Relaxation
from dms_jax.model.language_model import (
    QUEST_PAGE_SIZE,
    LanguageModel,
    check_model,
    check_tokens,
    temporary_cache,
    use_mesh,
    whole_numbers,
)
from dms_jax.model.layer_loop import ByCache
from dms_jax.model.transformer import Transformer
from dms_jax.policies import DMS, KVzap, Policy, TriAttention


def calibrate(
    model: LanguageModel,
    batches: Any,
    *,
    compression_ratio: float | int,
    policy: Policy | str | None = None,
) -> Policy:
    """Returns the policy with the threshold that keeps 1 / compression_ratio of held-out tokens.

    The share counts all layers and heads together, and only tokens that leave the window and are
    not KVzap's sinks; counting window and sinks, a sequence keeps more. Decisions are taken under
    full attention. A model that evicts has other hidden states and writes other texts, so measure
    its live tokens (`Usage`) and adjust the threshold. KVzap is trained without a threshold and
    needs this; DMS is trained for its ratio, and its `alpha_offset` is moved to ratios nearby.

    Args:
      model: a model with a trained scorer.
      batches: a list of held-out batches, as for `train`; a hundred thousand tokens are plenty.
      compression_ratio: tokens beyond the window per token kept.
      policy: the policy to calibrate; the model's own if None.

    Raises:
      ConfigError: the policy is neither KVzap nor DMS with an adapter, the model cannot run it, or
        `batches` is no list.
      DataError: no document of the batches is longer than the window, or a batch is malformed.
      OutOfMemoryError: a device has too little memory for a batch.
    """
    check_model(model)
    ratio = check("calibrate: compression_ratio", compression_ratio, Ratio)
    found = model.resolve_policy(policy)
    if not isinstance(found, KVzap | DMS) or found.retrofit.supervision is None:
        raise ConfigError(
            f"calibrate sets the threshold of KVzap() or of DMS(source='adapter'), and {found} has "
            "none that it could set."
        )
    check_batch_list("calibrate: batches", batches)
    scores = []
    room = fits_device(
        "The device ran out of memory while calibrating. Give batches of fewer or shorter ones."
    )
    with use_mesh(model.mesh), room:
        for batch in batches:
            given = check_batch(batch, vocab_size=model.config.vocab_size)
            ids = given.get("segment_ids")
            predicted, known = _predictions(
                model.transformer,
                jnp.asarray(given["tokens"]),
                None if ids is None else jnp.asarray(ids),
                found,
            )
            predicted = np.moveaxis(np.asarray(predicted), 1, 2)  # [L, K, B, T]
            known = np.asarray(known[0])
            if ids is not None:
                known = known & (ids > 0)
            scores.append(predicted[:, :, known].ravel())
    everything = np.concatenate(scores) if scores else np.zeros(0)
    if not everything.size:
        raise DataError(
            f"No token of the held-out batches leaves the window of {found.window} tokens. Give "
            "longer documents."
        )
    if isinstance(found, DMS):  # predicts eviction logits
        offset = found.alpha_offset + float(np.quantile(everything, 1 / ratio))
        return dataclasses.replace(found, alpha_offset=offset)
    return dataclasses.replace(found, threshold=float(np.quantile(everything, 1 - 1 / ratio)))


@jax.jit
def _predictions(transformer: Transformer, tokens: Any, segment_ids: Any, policy: Policy) -> Any:
    result = transformer(
        tokens, policy, segment_ids=segment_ids, relaxation=Relaxation(supervised=True)
    )
    assert result.supervision is not None
    return result.supervision.predicted, result.supervision.known


def calibrate_queries(
    model: LanguageModel, tokens: Int[np.ndarray, "B T"], path: str | pathlib.Path
) -> TriAttention:
    """Measures the centres of a model's queries on text, and returns a policy that uses them.

    A few thousand tokens of any text suffice: the centres hardly depend on the text (TriAttention,
    arXiv 2604.04921).

    Args:
      model: the model; its queries are computed with full attention.
      tokens: token ids of sequences of one length, run one by one.
      path: the file to write: `mean` [L, H, D] and `norm` [L, H, D/2] in float32, safetensors.

    Raises:
      ConfigError: `model` is no model.
      DataError: tokens are malformed, or too many for the model's positions.
      OutOfMemoryError: a device has too little memory for one sequence.
    """
    check_model(model)
    tokens = whole_numbers("token ids", tokens)
    if tokens.ndim != 2 or not tokens.size:
        raise DataError(f"calibrate_queries needs token ids [B, T], got {list(tokens.shape)}.")
    check_tokens(tokens, model.config)
    room = fits_device("The device ran out of memory while calibrating. Give shorter sequences.")
    with use_mesh(model.mesh), room:
        found = [jax.device_get(_centres(model.transformer, row[None])) for row in tokens]
    layers, heads = model.config.num_full_layers, model.config.num_heads
    mean, norm = (
        np.ascontiguousarray(np.mean(values, axis=0, dtype=np.float64), np.float32).reshape(
            layers, heads, -1
        )
        for values in zip(*found, strict=True)
    )
    path = pathlib.Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"mean": mean, "norm": norm}, path)
    return TriAttention(statistics=str(path))


@jax.jit
def _centres(transformer: Transformer, tokens: Any) -> tuple[Any, Any]:
    """Returns the means of one sequence's queries and of the norms of their planes, by layer."""
    policy, length = TriAttention(), tokens.shape[1]
    width = -(-length // QUEST_PAGE_SIZE)
    cache = temporary_cache(transformer, policy, 1, length, width=width)
    read = transformer.cached(tokens, jnp.full(1, length), cache, policy, one_pass=True)
    rows = read.cache.row_state
    own = (rows.growing if isinstance(rows, ByCache) else rows).own
    return own.mean, own.norm
