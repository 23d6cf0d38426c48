"""The threshold of a learned eviction that keeps a share of the tokens of held-out text."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dms_jax.checks import Ratio, check
from dms_jax.data.batches import check_batch, check_batch_list
from dms_jax.devices import fits_device
from dms_jax.errors import ConfigError, DataError
from dms_jax.model.attention import Relaxation
from dms_jax.model.language_model import LanguageModel, check_model, use_mesh
from dms_jax.model.transformer import Transformer
from dms_jax.policies import DMS, KVzap, Policy


def calibrate(
    model: LanguageModel,
    batches: Any,
    *,
    compression_ratio: float | int,
    policy: Policy | str | None = None,
) -> Policy:
    """Returns the policy with the threshold that keeps 1 / compression_ratio of held-out tokens.

    The share is over all layers and heads together, of the tokens that a query beyond the window
    follows, without KVzap's sinks: with these and the window a sequence keeps more. Decisions are
    those under full attention. A model that evicts has other hidden states and writes other texts:
    who needs a number of live tokens measures it (`Usage`) and moves the threshold on from here.
    KVzap is trained without a threshold and needs this; the `alpha_offset` of DMS, which is trained
    for its ratio, is moved by it to other ratios nearby.

    Args:
      model: a model with a scorer that was trained.
      batches: a list of held-out batches, in the form that `train` takes; a hundred thousand tokens
        are plenty.
      compression_ratio: tokens for each one that is kept beyond the window.
      policy: the policy to calibrate; the model's own if None.

    Raises:
      ConfigError: the policy is neither KVzap nor DMS with an adapter, or the model cannot run it;
        or an iterator is given, which may have no end.
      DataError: no document of the batches is longer than the window, or a batch is malformed.
      OutOfMemoryError: a device's memory does not suffice for a batch.
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
    if isinstance(found, DMS):  # what was predicted are logits of eviction
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
