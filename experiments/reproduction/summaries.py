"""What `Retention` says of layers, heads, positions, lengths and kinds of tokens: pure NumPy.

Averages are over the B sequences. A token is held `distance` tokens later if the query that comes
so much later sees it; only tokens that have such a query count. For policies that merge, a token is
held as long as it is the newest one of its slot, so "held" counts slots there, too.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Bool, Float

from dms_jax.analysis.retention import Retention
from dms_jax.checks import Whole, check
from dms_jax.errors import DataError

Kind = Literal["word", "word part", "digits", "punctuation", "space", "special"]
KINDS: tuple[Kind, ...] = ("word", "word part", "digits", "punctuation", "space", "special")


def total_ratio(found: Retention) -> Float[np.ndarray, " T"]:
    """Returns the compression ratio of all heads together after each token."""
    return np.arange(1, found.length + 1) / found.live().mean((0, 1, 2))


def kept_by_distance(found: Retention) -> Float[np.ndarray, "L K T"]:
    """Returns the share of tokens that each head still holds at each distance, from 0.

    # One head, gone: [2, 4, 4] of 3 tokens  Out: [3/3, 2/2, 0/1]
    """
    length = found.length
    layers, batch, heads, _ = found.gone.shape
    counts = np.zeros((layers, heads, length + 1), int)
    rows = np.indices(found.gone.shape)
    np.add.at(counts, (rows[0], rows[2], found.lifetimes()), 1)
    longer = counts[..., ::-1].cumsum(-1)[..., -2::-1]  # tokens that live longer than each distance
    return longer / (batch * np.arange(length, 0, -1))


def kept_by_position(found: Retention) -> Float[np.ndarray, "L K T"]:
    """Returns the share of sequences in which the last query sees the token at each position."""
    return found.seen_by(found.length - 1).mean(1)


def held_later(found: Retention, distance: int) -> Bool[np.ndarray, "L B K n"]:
    """Returns whether each token is held `distance` tokens later; n = T - distance.

    Raises:
      ConfigError: `distance` is not a whole number.
      DataError: no token has a query so much later.
    """
    distance = check("distance", distance, Whole)
    if distance >= found.length:
        raise DataError(
            f"Of {found.length} tokens none has one {distance} later; give a smaller distance."
        )
    return (found.lifetimes() > distance)[..., : found.length - distance]


def kinds_of(texts: Sequence[str]) -> list[Kind]:
    """Returns the kind of each token of a text, from the texts that the tokens add.

    # texts: ["", "Ann", " has", " 1", "2", " cat", "s", "."]
    # Out: special, word, word, digits, digits, word, word part, punctuation
    """
    kinds: list[Kind] = []
    before = " "
    for text in texts:
        bare = text.strip()
        if not text:
            kinds.append("special")
        elif not bare:
            kinds.append("space")
        elif any(letter.isdigit() for letter in bare):
            kinds.append("digits")
        elif not any(letter.isalpha() for letter in bare):
            kinds.append("punctuation")
        else:
            kinds.append("word part" if before[-1].isalpha() and text[0].isalpha() else "word")
        before = text or before
    return kinds


def kept_by_kind(
    found: Retention, kinds: Sequence[Sequence[str]], *, distance: int
) -> Float[np.ndarray, "L K kinds"]:
    """Returns the share of the tokens of each kind that each head holds `distance` tokens later.

    NaN for kinds that do not occur.

    Args:
      found: what was held.
      kinds: the kind of each token of each sequence, from `kinds_of`.
      distance: how much later.

    Raises:
      DataError: the kinds are not those of the sequences.
    """
    held = held_later(found, distance)
    if [len(one) for one in kinds] != [found.length] * found.tokens.shape[0]:
        raise DataError(
            f"kinds wants {found.tokens.shape[0]} lists of {found.length} kinds, one a token, got "
            f"lists of {[len(one) for one in kinds]}."
        )
    if unknown := {kind for one in kinds for kind in one} - set(KINDS):
        raise DataError(f"{', '.join(sorted(unknown))} is no kind; there are {', '.join(KINDS)}.")
    table = np.array([[KINDS.index(kind) for kind in one] for one in kinds])[:, : held.shape[-1]]
    members = (table[..., None] == np.arange(len(KINDS))).astype(float)  # [B, n, kinds]
    with np.errstate(invalid="ignore"):
        return np.einsum("LBKn,Bnc->LKc", held, members) / members.sum((0, 1))


def specialisation(
    found: Retention, kinds: Sequence[Sequence[str]], *, distance: int
) -> Float[np.ndarray, "L K kinds"]:
    """Returns `kept_by_kind` less the share of all tokens that the head holds: what it prefers."""
    everything = held_later(found, distance).mean((1, 3))
    return kept_by_kind(found, kinds, distance=distance) - everything[..., None]


def head_agreement(found: Retention, *, distance: int) -> Float[np.ndarray, "heads heads"]:
    """Returns the correlation of what two heads hold `distance` tokens later; heads = L * K.

    1 if they hold the same tokens, 0 if one says nothing of the other; NaN for heads that hold
    everything or nothing. Head k of layer l is number l * K + k.
    """
    held = held_later(found, distance)
    rows = np.moveaxis(held, 1, 2).reshape(-1, held.shape[1] * held.shape[3]).astype(float)
    return _correlation(rows)


def text_agreement(found: Retention) -> float:
    """Returns how alike the heads' ratios are in two texts: the mean correlation of their logs.

    1 if the heads that compress most are the same in all texts, 0 if the text decides.
    NaN for a single text, and if all heads compress alike.
    """
    ratio = np.log(found.length / found.live()[..., -1])
    texts = np.moveaxis(ratio, 1, 0).reshape(ratio.shape[1], -1)
    pairs = _correlation(texts)[np.triu_indices(len(texts), 1)]
    return float(pairs.mean()) if len(pairs) else float("nan")


def _correlation(rows: Float[np.ndarray, "n m"]) -> Float[np.ndarray, "n n"]:
    """Returns Pearson's correlation of each two rows; NaN for a constant row."""
    centred = rows - rows.mean(1, keepdims=True)
    norm = np.sqrt((centred**2).sum(1))
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(
            np.outer(norm, norm) > 0, centred @ centred.T / np.outer(norm, norm), np.nan
        )
