"""Tokens of some lanes as the arrays of one compiled chunk, and what the chunk leaves.

A chunk has b places: every lane its own where lanes stay put (on a mesh), else the next power of
two above the lanes that have tokens. A place without tokens is nobody's.
"""

import dataclasses
from collections.abc import Container, Mapping

import numpy as np
from jaxtyping import Array, Bool, Int

from dms_jax.generation.programs import bucket


@dataclasses.dataclass(frozen=True)
class Placed:
    """The tokens of a chunk.

    Attributes:
      lanes: the lane of each place; beyond the last lane for nobody.
      tokens: token ids, zero after the last one of each place.
      counts: tokens of each place.
      ends: whether they complete the prompt of the lane.
    """

    lanes: Int[np.ndarray, " b"]
    tokens: Int[np.ndarray, "b T"]
    counts: Int[np.ndarray, " b"]
    ends: Bool[np.ndarray, " b"]


@dataclasses.dataclass(frozen=True)
class Extended:
    """What a chunk of given tokens leaves.

    Attributes:
      hidden: on the device, [b, E], of each place's last token.
      lanes: Int[b], the lane of each place; beyond the last lane for nobody.
      live: lane -> live slots (a total over its L * K rows) right after each of its tokens.
      held: lane -> entries that were there at once (likewise) in one pass; 0 token by token.
    """

    hidden: Array
    lanes: np.ndarray
    live: dict[int, np.ndarray]
    held: dict[int, int]


def place(
    tokens: Mapping[int, np.ndarray],
    *,
    num_lanes: int,
    width: int,
    stay: bool,
    ends_prompt: Container[int],
) -> Placed:
    """Places tokens for a chunk.

    Args:
      tokens: lane -> up to `width` token ids.
      num_lanes: B.
      width: T of the compiled chunk.
      stay: whether every lane has a place of its own.
      ends_prompt: lanes whose prompt the tokens complete.
    """
    if stay:
        lanes = np.arange(num_lanes, dtype=np.int32)
    else:
        lanes = np.full(min(bucket(len(tokens)), num_lanes), num_lanes, np.int32)
        lanes[: len(tokens)] = sorted(tokens)
    batch = np.zeros((len(lanes), width), np.int32)
    counts = np.zeros(len(lanes), np.int32)
    for row, lane in enumerate(lanes.tolist()):
        if lane in tokens:
            counts[row] = len(tokens[lane])
            batch[row, : counts[row]] = tokens[lane]
    ends = np.array([lane in ends_prompt for lane in lanes.tolist()])
    return Placed(lanes=lanes, tokens=batch, counts=counts, ends=ends)
