"""Batches that a caller makes: checked, because a token outside the vocabulary raises nothing.

{"tokens": [B, T]}, and optionally "loss_mask" and "segment_ids" of the same shape
"""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from dms_jax.checks import require, show
from dms_jax.data.batches import Batch
from dms_jax.data.encodable import check_vocabulary
from dms_jax.errors import DataError
from dms_jax.model.language_model import whole_numbers

_KNOWN = {"tokens", "loss_mask", "segment_ids"}


def given_batch(batch: Any, *, vocab_size: int, shape: tuple[int, int] | None = None) -> Batch:
    """Returns a batch as arrays: int32 tokens and segment ids, and a loss mask of bool.

    Args:
      batch: what the caller's iterator gave.
      vocab_size: V.
      shape: (B, T); None for any.

    Raises:
      DataError: it is no batch, or not of this shape, vocabulary and form.
    """
    if not isinstance(batch, Mapping) or "tokens" not in batch or batch.keys() - _KNOWN:
        found = show(batch)
        if isinstance(batch, Mapping):
            found = ", ".join(sorted(map(str, batch))) or "nothing"
        raise DataError(
            "A batch is a dict of tokens and, optionally, loss_mask and segment_ids; got "
            f"{found}. An iterator gives batches: give texts or token ids as a list."
        )
    tokens = whole_numbers("The tokens of a batch", batch["tokens"])
    if tokens.ndim != 2 or (shape is not None and tokens.shape != shape):
        wanted = "[B, T]" if shape is None else shape
        raise DataError(f"A batch must hold tokens of shape {wanted}, got {tokens.shape}.")
    check_vocabulary(tokens, vocab_size)
    for name in _KNOWN & batch.keys():
        if np.shape(batch[name]) != tokens.shape:
            raise DataError(
                f"The {name} of a batch must have the shape of its tokens, {tokens.shape}, got "
                f"{np.shape(batch[name])}."
            )
    result = {"tokens": tokens.astype(np.int32), "loss_mask": np.ones(tokens.shape, bool)}
    if "loss_mask" in batch:
        mask = np.asarray(batch["loss_mask"])
        if not np.isin(mask, (0, 1)).all():
            raise DataError(
                "The loss_mask of a batch says of each token whether it counts: 0 or 1."
            )
        result["loss_mask"] = mask.astype(bool)
    if "segment_ids" in batch:
        ids = whole_numbers("The segment_ids of a batch", batch["segment_ids"])
        if ids.size and ids.min() < 0:
            raise DataError("The segment_ids of a batch are 1, 2, ..., and 0 for padding.")
        result["segment_ids"] = ids.astype(np.int32)
    return result


def check_batches(what: str, batches: Any) -> None:
    """Refuses what is no list of batches: the iterators that are trained on have no end.

    Raises:
      ConfigError: it is none.
    """
    require(
        isinstance(batches, Collection) and not isinstance(batches, Mapping),
        f"{what} must be a list of batches, got {show(batches)}. Of an iterator, which may have no "
        "end, give list(itertools.islice(iterator, 16)).",
    )
