"""The batch of one compiled chunk: which lanes take part, with which tokens, and the result.

A batch has b entries: one for each lane if lanes are fixed (on a mesh), otherwise one for each lane
that has tokens, rounded up to a power of two. The remaining entries belong to no lane.
"""

import dataclasses
from collections.abc import Container, Mapping

import numpy as np
from jaxtyping import Array, Bool, Int

from dms_jax.generation.programs import bucket


@dataclasses.dataclass(frozen=True)
class ChunkBatch:
    """The tokens of a chunk as arrays with one entry per lane that takes part.

    Attributes:
      lanes: the lane of each entry; a number beyond the last lane means none.
      tokens: token ids of each entry, padded with zeros.
      counts: number of tokens of each entry.
      ends: whether each entry's tokens complete the prompt of its lane.
    """

    lanes: Int[np.ndarray, " b"]
    tokens: Int[np.ndarray, "b T"]
    counts: Int[np.ndarray, " b"]
    ends: Bool[np.ndarray, " b"]


@dataclasses.dataclass(frozen=True)
class Extended:
    """The result of running given tokens through the cache.

    Attributes:
      hidden: [b, E] on the device, the hidden state of each entry's last token.
      lanes: Int[b], the lane of each entry; a number beyond the last lane means none.
      live: lane -> live slots, summed over its L * K rows, after each of its tokens.
      held: lane -> slots held at once, summed likewise, if the tokens ran in one pass; 0 if they
        ran one by one.
    """

    hidden: Array
    lanes: np.ndarray
    live: dict[int, np.ndarray]
    held: dict[int, int]


def build_batch(
    tokens: Mapping[int, np.ndarray],
    *,
    num_lanes: int,
    width: int,
    fixed_lanes: bool,
    ends_prompt: Container[int],
) -> ChunkBatch:
    """Builds the batch of a chunk.

    Args:
      tokens: lane -> up to `width` token ids.
      num_lanes: number of lanes (B).
      width: number of tokens of the compiled chunk (T).
      fixed_lanes: whether every lane has an entry of its own.
      ends_prompt: lanes whose prompt the tokens complete.
    """
    if fixed_lanes:
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
    return ChunkBatch(lanes=lanes, tokens=batch, counts=counts, ends=ends)
