"""The batch of one compiled chunk: which lanes take part, with which tokens, and the result.

A batch has b entries: one for each lane if lanes are fixed (on a mesh), otherwise at least one for
each lane that has tokens. The remaining entries belong to no lane. Its shape is one of a few
(`shapes.py`).
"""

import dataclasses
import functools
from collections.abc import Container, Mapping

import numpy as np
from jaxtyping import Array, Bool, Int

from dms_jax.cache.host_values import Tail
from dms_jax.generation.packing import Packed
from dms_jax.generation.shapes import Shape


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
      counts: Int[b], the number of tokens of each entry.
      before: Int[b] on the device, slots in use before the tokens, summed over L * K rows.
      totals: Int[b, T] on the device, live slots after each token, summed likewise.
      rows: L * K if the tokens ran in one pass, and so all held a slot in each row at once, else 0.
      lengths: Int[L, B, K] on the device, slots in use of each row after the cut of whole rows
        behind the last token; None where the policy makes none.
    """

    hidden: Array
    lanes: np.ndarray
    counts: np.ndarray
    before: Array
    totals: Array
    rows: int
    lengths: Array | None

    @functools.cached_property
    def live(self) -> dict[int, np.ndarray]:
        """Live slots by lane, after each of its tokens; waits for the program."""
        totals = np.asarray(self.totals)
        return {
            int(self.lanes[row]): totals[row, : self.counts[row]]
            for row in np.flatnonzero(self.counts)
        }

    @functools.cached_property
    def left(self) -> dict[int, int]:
        """Slots in use by lane at the end, after any cut, summed likewise; waits for it."""
        if self.lengths is None:
            return {lane: int(live[-1]) for lane, live in self.live.items()}
        totals = np.asarray(self.lengths).sum((0, 2))
        return {lane: int(totals[lane]) for lane in self.live}

    @functools.cached_property
    def held(self) -> dict[int, int]:
        """Slots held at once by lane, summed likewise; 0 if the tokens ran one by one."""
        if not self.rows:
            return dict.fromkeys(self.lanes[self.counts > 0].tolist(), 0)
        held = np.asarray(self.before) + self.rows * self.counts
        return {int(self.lanes[row]): int(held[row]) for row in np.flatnonzero(self.counts)}


@dataclasses.dataclass(frozen=True)
class LaunchedSteps:
    """A chunk of decode steps that was launched, until it is read.

    Attributes:
      steps: its results, on the device (`programs.Steps`).
      newest: Int[B], mostly on the device, the newest token of each lane after it.
      most: Int[B], the most tokens that each lane takes.
      end_tokens: token ids that end an answer.
      tail: the values that the host must write, if it holds any.
      table: the page table that it runs with.
      forgotten: Int[B], that of `Rows` when it was launched.
    """

    steps: Packed
    newest: np.ndarray | Array
    most: Int[np.ndarray, " B"]
    end_tokens: tuple[int, ...]
    tail: Tail | None
    table: Int[np.ndarray, "L B K M"]
    forgotten: Int[np.ndarray, " B"]


def build_batch(
    tokens: Mapping[int, np.ndarray],
    *,
    num_lanes: int,
    shape: Shape,
    fixed_lanes: bool,
    ends_prompt: Container[int],
) -> ChunkBatch:
    """Builds the batch of a chunk.

    Args:
      tokens: lane -> up to T token ids.
      num_lanes: number of lanes (B).
      shape: shape of the compiled chunk, with another number of entries if lanes are fixed.
      fixed_lanes: whether every lane has an entry of its own.
      ends_prompt: lanes whose prompt the tokens complete.

    Raises:
      ValueError: there are more tokens than places, where some would be lost.
    """
    total = sum(map(len, tokens.values()))
    if shape.places is not None and total > shape.places:
        raise ValueError(f"{total} tokens have no room in a program with {shape.places} places.")
    if fixed_lanes:
        lanes = np.arange(num_lanes, dtype=np.int32)
    else:
        lanes = np.full(shape.entries, num_lanes, np.int32)
        lanes[: len(tokens)] = sorted(tokens)
    batch = np.zeros((len(lanes), shape.width), np.int32)
    counts = np.zeros(len(lanes), np.int32)
    for row, lane in enumerate(lanes.tolist()):
        if lane in tokens:
            counts[row] = len(tokens[lane])
            batch[row, : counts[row]] = tokens[lane]
    ends = np.array([lane in ends_prompt for lane in lanes.tolist()])
    return ChunkBatch(lanes=lanes, tokens=batch, counts=counts, ends=ends)
