"""The batch of one compiled chunk: which lanes take part, with which tokens, and the result.

A batch has b entries: one for each lane if lanes are fixed (on a mesh), otherwise at least one for
each lane that has tokens. The remaining entries belong to no lane.

Every shape is a program to compile, so prompts of any number and length run in a few of them. All
but attention is computed for the places of a program: its tokens stand there without padding
(`model.unpadded`), so that programs for short prompts have half as many as entries x width.

    8192 tokens in a program, chunks of 512 tokens, 256 lanes
    entries x width      24 x 512   3 x 512   32 x 256   4 x 256
    places                   8192      1024       4096       512

On a mesh every entry has places for its whole width:

    entries x width      16 x 512   2 x 512   32 x 256   4 x 256

and where padding takes long, because a policy reads tokens one by one or all lanes take part:

    entries x width      16 x 512   2 x 512   64 x 128   8 x 128   256 x 32   32 x 32

The width of a prompt's chunks depends on its own length only, and so does what it is rounded to.
"""

import dataclasses
import functools
from collections.abc import Container, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array, Bool, Int

from dms_jax.cache.host_values import Tail
from dms_jax.generation.packing import Packed


class Shape(NamedTuple):
    """The shape of a program that reads prompts.

    Attributes:
      width: tokens of an entry (T).
      entries: number of entries (b).
      places: tokens of all entries together (N), without padding; None for b * T.
    """

    width: int
    entries: int
    places: int | None

    @property
    def most(self) -> int:
        """The most tokens of all entries together."""
        return self.entries * self.width if self.places is None else self.places


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes in which an engine reads prompts.

    Attributes:
      widths: numbers of tokens of an entry, the largest first.
      passes: the most chunks of a narrower width that a prompt is read in.
      tokens: the most tokens of a program, unless a single entry has more.
      num_lanes: number of lanes, and the most entries of a program.
      launch: what a program takes besides its tokens, in tokens.
      unpadded: whether programs have fewer places than entries x width.
    """

    widths: tuple[int, ...]
    passes: int
    tokens: int
    num_lanes: int
    launch: int
    unpadded: bool

    @classmethod
    def of(
        cls,
        chunk: int,
        tokens: int,
        num_lanes: int,
        *,
        few: bool,
        unpadded: bool,
        layer_size: int,
    ) -> "Shapes":
        """Returns the shapes for prompts.

        Args:
          chunk: the most tokens of a prompt in a program.
          tokens: the most tokens of all prompts in a program.
          num_lanes: number of lanes.
          few: whether there are few widths, because padding takes little time.
          unpadded: whether products are computed for tokens without padding.
          layer_size: number of parameters of a layer.
        """
        fractions, passes = ((2,), 1) if few else ((4, 16), 2)
        narrow = (chunk // fraction for fraction in fractions)
        widths = (chunk, *(width for width in narrow if width >= _NARROWEST))
        launch = min(max(_LAUNCH // layer_size, 64), 4096)
        return cls(widths, passes, tokens, num_lanes, launch, unpadded)

    def next_batch(self, left: Mapping[Any, int]) -> tuple[list[Any], Shape]:
        """Returns the lanes that run next, and the shape of their program.

        The first of those that have tokens of the widest width is among them.

        Args:
          left: lane -> number of its tokens that have not run.
        """
        width_of = {lane: self.width(count) for lane, count in left.items()}
        width = max(width_of.values())
        counts = {lane: min(left[lane], width) for lane, own in width_of.items() if own == width}
        lanes, total = len(counts), sum(counts.values())
        shape = min(self.of_width(width), key=lambda each: self._cost(lanes, total, each))
        chosen, room = [], shape.most
        for lane, count in counts.items():
            if count <= room and len(chosen) < shape.entries:
                chosen.append(lane)
                room -= count
        return chosen, shape

    def batches(self, counts: Iterable[int], *, refilled: bool) -> set[Shape]:
        """Returns the shapes of the programs that read prompts.

        Args:
          counts: numbers of tokens of the prompts that are read together at first, in the order of
            their lanes.
          refilled: whether others like them come later, a few at a time.
        """
        left = dict(enumerate(counts))
        found = set[Shape]()
        while left:
            lanes, shape = self.next_batch(left)
            found |= set(self.of_width(shape.width) if refilled else [shape])
            # They run again, and nothing else, until one of them has no whole chunk left.
            times = max(1, min(left[lane] // shape.width for lane in lanes))
            for lane in lanes:
                left[lane] -= times * shape.width
                if left[lane] <= 0:
                    del left[lane]
        return found

    @property
    def all(self) -> list[Shape]:
        """Every shape that there can be."""
        return [shape for width in self.widths for shape in self.of_width(width)]

    def of_width(self, width: int) -> list[Shape]:
        """Returns the shapes of a width, the smallest first."""
        most = min(max(1, self.tokens // width), self.num_lanes)
        sizes = sorted({max(1, most // 8), most})
        if not self.unpadded:
            return [Shape(width, size, None) for size in sizes]
        if width == self.widths[0]:  # the tokens of whole chunks, or of more that end prompts
            shapes = [(min(size * 3 // 2, self.num_lanes), size * width) for size in sizes]
        else:  # prompts of this width fill half of it in the mean
            shapes = [(size, max(width, size * width // 2)) for size in sizes]
        return [
            Shape(width, entries, places if places < entries * width else None)
            for entries, places in shapes
        ]

    def width(self, count: int) -> int:
        """Returns the narrowest width of which as many as may be hold the tokens."""
        holding = (width for width in self.widths[::-1] if count <= self.passes * width)
        return next(holding, self.widths[0])

    def _cost(self, lanes: int, tokens: int, shape: Shape) -> int:
        """Returns what programs for so many tokens of so many lanes take, in tokens."""
        programs = max(-(-lanes // shape.entries), -(-tokens // shape.most))
        return programs * (self.launch + shape.most)


# Narrower programs would take as long: they read the weights.
_NARROWEST = 16
# Parameters that a token is multiplied by in the time that the launches of a layer take: 0.1 ms
# at 800 TFLOP/s.
_LAUNCH = 40_000_000_000


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
