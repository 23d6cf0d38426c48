"""Prefill: the queue of prompts, and the few compiled shapes in which they run.

The queue (`PrefillQueue`) holds the lanes that do not decode yet:

    lane 0   launched 512 of 1300 tokens
    lane 1   shares the prompt of lane 0
    lane 2   its prompt of 40 is done; now the answer that it had before it was preempted
    lane 3   decodes: it is not here

A program runs tokens of one class: of prompts or of answers, in one attention pass or one by one,
and of one width. If nothing is decoded meanwhile, prompts come before answers, single passes before
the rest, and wide chunks before narrow ones, so that the last parts of prompts share programs. If
answers are decoded meanwhile, programs alternate between the oldest prompt and the shortest one,
each together with others of its class. So no prompt waits forever, and a short one waits for at
most one program of a longer prompt between two of its own. Urgent prompts (`Request.priority`) come
before all others.

Every shape is a program to compile, so prompts of any number and length run in a few of them. All
but attention is computed for the places of a program, which hold its tokens without padding
(`model.unpadded`): programs for short prompts have half as many places as entries x width.

    8192 tokens in a program, chunks of 512 tokens, 256 lanes
    entries x width      24 x 512   3 x 512   48 x 256   6 x 256
    places                   8192      1024       4096       512

On a mesh every entry has places for its whole width:

    entries x width      16 x 512   2 x 512   32 x 256   4 x 256

If lanes are split over devices (the axis `data`), each group of lanes has so many entries in a
program. Where padding takes long, because a policy reads tokens one by one or all lanes take part:

    entries x width      16 x 512   2 x 512   64 x 128   8 x 128   256 x 32   32 x 32

The first tokens of a prompt, while such a policy evicts nothing yet, use the first table. The width
of a prompt's chunks depends only on its own length and its policy, and so do its roundings, unless
a part of it is cached or its prefill stops where a prefix is to be cached (`prefixes`).
"""

import collections
import dataclasses
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from dms_jax.generation.requests import Request
from dms_jax.policies import Policy


class Shape(NamedTuple):
    """The shape of a program that prefills.

    Attributes:
      width: tokens of an entry (T).
      entries: number of entries (b).
      places: tokens of all entries together (N), without padding; None for b * T.
      one_pass: whether the tokens of an entry attend in one pass, not one by one.
    """

    width: int
    entries: int
    places: int | None
    one_pass: bool

    @property
    def most(self) -> int:
        """The most tokens of all entries together."""
        return self.entries * self.width if self.places is None else self.places


@dataclasses.dataclass(frozen=True)
class Shapes:
    """The shapes of programs of one kind: tokens attend in one pass, or go one by one.

    Attributes:
      widths: numbers of tokens of an entry, the largest first.
      passes: the most chunks of a narrower width that a prompt is cut into.
      tokens: the most tokens of a program in each group, unless a single entry has more.
      num_lanes: number of lanes, and the most entries of a program.
      launch: the fixed cost of a program, in tokens.
      unpadded: whether programs have fewer places than entries x width.
      one_pass: see `Shape`.
      groups: groups of as many lanes, one after the other, each with its part of the entries.
    """

    widths: tuple[int, ...]
    passes: int
    tokens: int
    num_lanes: int
    launch: int
    unpadded: bool
    one_pass: bool
    groups: int = 1

    @classmethod
    def of(
        cls,
        chunk: int,
        tokens: int,
        num_lanes: int,
        *,
        groups: int = 1,
        few: bool,
        unpadded: bool,
        one_pass: bool,
        layer_size: int,
    ) -> "Shapes":
        """Returns the shapes for prompts in chunks of at most `chunk` tokens.

        Args:
          groups: groups of lanes that share no entries.
          few: whether there are few widths, because padding takes little time.
          layer_size: number of parameters of a layer.
        """
        fractions, passes = ((2,), 1) if few else ((4, 16), 2)
        narrow = (chunk // fraction for fraction in fractions)
        widths = (chunk, *(width for width in narrow if width >= _NARROWEST))
        launch = min(max(_LAUNCH // layer_size, 64), 4096)
        return cls(widths, passes, tokens, num_lanes, launch, unpadded, one_pass, groups)

    def group_of(self, lane: int) -> int:
        """Returns the group of a lane."""
        return lane * self.groups // self.num_lanes if self.groups > 1 else 0

    def next_batch(
        self, left: Mapping[Any, int], most: int | None = None
    ) -> tuple[list[Any], Shape] | None:
        """Returns the lanes that run next, and the shape of their program.

        The first lane with a chunk of the widest width is among them.

        Args:
          left: lane -> number of its tokens that have not run.
          most: the most tokens of a program; None for any. If every shape is larger, the result is
            None.
        """
        width_of = {lane: self.width(count) for lane, count in left.items()}
        width = max(width_of.values())
        counts = {lane: min(left[lane], width) for lane, own in width_of.items() if own == width}
        total, by_group = sum(counts.values()), collections.Counter(map(self.group_of, counts))
        shapes = [each for each in self.of_width(width) if most is None or each.most <= most]
        if not shapes:
            return None
        lanes = max(by_group.values())
        shape = min(shapes, key=lambda each: self._cost(lanes, total, each))
        chosen, room = [], shape.most
        free = [shape.entries // self.groups] * self.groups
        for lane, count in counts.items():
            if count <= room and free[self.group_of(lane)]:
                chosen.append(lane)
                room -= count
                free[self.group_of(lane)] -= 1
        return chosen, shape

    def batches(self, counts: Iterable[int], *, refilled: bool) -> set[tuple[Shape, bool]]:
        """Returns the shapes of the programs that prefill, each with whether it ends a prompt.

        Args:
          counts: numbers of tokens of the prompts that are prefilled together, by lane.
          refilled: whether similar prompts come later, a few at a time.
        """
        if refilled:
            chunks = {each for count in set(counts) for each in self._chunks(count)}
            return {(shape, ends) for width, ends in chunks for shape in self.of_width(width)}
        # In the lanes that they get: those of each group in turn.
        left = {
            (number % self.groups * self.num_lanes + number) // self.groups: count
            for number, count in enumerate(counts)
        }
        found = set[tuple[Shape, bool]]()
        while left:
            batch = self.next_batch(left)
            assert batch is not None, "no program is too large"
            lanes, shape = batch
            # The same lanes run again until one of them has no whole chunk left.
            times = max(1, min(left[lane] // shape.width for lane in lanes))
            if times > 1:
                found.add((shape, False))
            for lane in lanes:
                left[lane] -= times * shape.width
            found.add((shape, any(left[lane] <= 0 for lane in lanes)))
            left = {lane: count for lane, count in left.items() if count > 0}
        return found

    def every(self, most: int) -> set[tuple[Shape, bool]]:
        """Like `batches`, for every length of a prompt up to `most`."""
        # Prompts with more whole chunks need no further programs.
        return self.batches(range(1, min(most, 2 * self.widths[0]) + 1), refilled=True)

    def _chunks(self, count: int) -> set[tuple[int, bool]]:
        """Returns the widths of the chunks of a prompt, each with whether it ends there."""
        found = set[tuple[int, bool]]()
        whole = max(0, count // self.widths[0] - 1)  # chunks, before the last one or two
        if whole:
            found.add((self.widths[0], False))
            count -= whole * self.widths[0]
        while count > 0:
            width = self.width(count)
            found.add((width, count <= width))
            count -= width
        return found

    def of_width(self, width: int) -> list[Shape]:
        """Returns the shapes of a width, the smallest first."""
        most = min(max(1, self.tokens // width), self.num_lanes // self.groups)
        sizes = sorted({max(1, most // 8), most})
        if not self.unpadded:
            return [Shape(width, size * self.groups, None, self.one_pass) for size in sizes]
        # Whole chunks fill their width, and narrower ones half of it on average.
        share = 1 if width == self.widths[0] else 2
        entries = [min(size * 3 // 2, self.num_lanes) for size in sizes]
        places = [max(width, size * width // share) for size in sizes]
        return [
            Shape(width, size, most if most < size * width else None, self.one_pass)
            for size, most in zip(entries, places, strict=True)
        ]

    def width(self, count: int) -> int:
        """Returns the narrowest width in which the tokens take at most `passes` chunks."""
        holding = (width for width in self.widths[::-1] if count <= self.passes * width)
        return next(holding, self.widths[0])

    def _cost(self, lanes: int, tokens: int, shape: Shape) -> int:
        """Returns the time of programs for `tokens` tokens, in tokens of all groups together.

        `lanes` are those of the group that has the most.
        """
        entries = shape.entries // self.groups
        programs = max(-(-lanes // entries), -(-tokens // shape.most))
        return programs * (self.groups * self.launch + shape.most)


class PromptShapes(NamedTuple):
    """The shapes in which an engine prefills prompts, and recomputes answers.

    Attributes:
      one_pass: for tokens that attend in one pass.
      one_by_one: for tokens that the policy must see one after the other.
    """

    one_pass: Shapes
    one_by_one: Shapes

    def of(self, one_pass: bool) -> Shapes:
        """Returns the shapes of one kind."""
        return self.one_pass if one_pass else self.one_by_one


# A program of this many tokens keeps any device busy. One by one, more tokens take no longer.
SATURATING = 1 << 16
# Narrower programs take as long as this width: they read all weights.
_NARROWEST = 16
# Multiply-adds in the time of a layer's launches: 0.1 ms at 800 TFLOP/s.
_LAUNCH = 40_000_000_000


def tokens_in_one_pass(policy: Policy, *, prompt: int, max_length: int) -> int:
    """Returns the number of first tokens of a sequence that attend in one pass.

    Tokens after its prompt count too if the policy treats them in the same way.

    Args:
      policy: the policy of the cache.
      prompt: tokens of its prompt.
      max_length: length that the sequence can reach.
    """
    if policy.parallel == "always":
        return max_length
    if policy.parallel == "prompts":
        return prompt
    return policy.kept_whole(max_length)


def cuts_prompts(policy: Policy, shape: Shape | Shapes) -> bool:
    """Whether programs of these shapes cut rows at the end of prompts."""
    return policy.shrinks and shape.one_pass


@dataclasses.dataclass(eq=False)
class Prefill:
    """The tokens that a lane prefills before it decodes.

    Attributes:
      request: the request in the lane.
      prompt: its prompt.
      answer: the answer it had when it was preempted, to be recomputed as an answer.
      whole: number of first tokens of prompt and answer that attend in one pass.
      key: equal for requests that share one prefill; None if it is not shared.
      source: the lane that prefills the prompt, its own or another one.
      done: tokens that were launched, or cached from the start.
      stops: lengths of prefixes of its prompt that are to be cached, ascending.
      splits: whether a program must end at each stop, because the policy overwrites slots.
    """

    request: Request
    prompt: list[int]
    answer: list[int]
    whole: int
    key: Hashable = None
    source: int = -1
    done: int = 0
    stops: tuple[int, ...] = ()
    splits: bool = False

    @property
    def in_prompt(self) -> bool:
        """Whether its next token belongs to its prompt."""
        return self.done < len(self.prompt)

    @property
    def one_pass(self) -> bool:
        """Whether its next token attends in one pass with others."""
        return self.done < self.whole

    @property
    def rest(self) -> int:
        """Tokens of its prompt and its answer that were not launched."""
        return len(self.prompt) + len(self.answer) - self.done

    @property
    def left(self) -> int:
        """Tokens to launch up to the next boundary.

        Boundaries are the end of the tokens that attend in one pass, the end of the prompt, the end
        of the answer, and, if `splits`, the next stop.
        """
        end = len(self.prompt)
        if self.done >= end:
            end += len(self.answer)
        if self.done < self.whole < end:
            end = self.whole
        return min([end, *self.stops] if self.splits else [end]) - self.done

    def pass_stops(self) -> list[int]:
        """Removes the stops that its launched tokens have reached; returns them."""
        passed = [each for each in self.stops if each <= self.done]
        self.stops = self.stops[len(passed) :]
        return passed

    def next(self, width: int) -> np.ndarray:
        """Returns its next `width` tokens, at most `left`."""
        tokens, start = self.prompt, self.done
        if not self.in_prompt:
            tokens, start = self.answer, self.done - len(self.prompt)
        return np.asarray(tokens[start : start + width], np.int32)


@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """The next program of prompts.

    Attributes:
      tokens: lane -> up to `shape.width` token ids.
      shape: shape of the program.
      prompt: whether they are tokens of prompts.
      ends_prompt: lanes whose prompt they complete.
    """

    tokens: dict[int, np.ndarray]
    shape: Shape
    prompt: bool
    ends_prompt: Sequence[int] = ()


class PrefillQueue:
    """The queue of lanes that do not decode yet.

    Args:
      takes_turns: whether answers are decoded meanwhile.

    Attributes:
      shapes: the shapes of programs.
      items: lane -> its `Prefill`, in order of arrival.
    """

    def __init__(self, shapes: PromptShapes, *, takes_turns: bool):
        self.items: dict[int, Prefill] = {}
        self.shapes, self._takes_turns = shapes, takes_turns
        self._shortest_next = False  # whether the next program is that of the shortest prompt
        self._first: dict[Hashable, int] = {}  # the first lane of those that share a prompt

    def add(self, lane: int, item: Prefill) -> bool:
        """Queues a lane; returns whether it prefills its prompt itself (no other lane does)."""
        item.source = lane if item.key is None else self._first.setdefault(item.key, lane)
        self.items[lane] = item
        return item.source == lane

    def drop_departed(self, running: Mapping[int, Request]) -> None:
        """Drops lanes whose requests have left them."""
        left = [lane for lane, each in self.items.items() if running.get(lane) is not each.request]
        self._drop(left)

    def spared(self, cancelled: set[int]) -> set[int]:
        """Returns cancelled requests that must go on because others share their prompt."""
        sources = {
            each.source for each in self.items.values() if each.request.index not in cancelled
        }
        found = {each.request.index for lane, each in self.items.items() if lane in sources}
        return found & cancelled

    @property
    def has_tokens(self) -> bool:
        """Whether any tokens wait for prefill."""
        return any(each.source == lane and each.left for lane, each in self.items.items())

    def next_batch(self, most: int | None = None) -> PrefillBatch | None:
        """Returns the next program; None if the queue is empty.

        Args:
          most: the most tokens of a program; None for any. If the next one is larger, the result is
            None, and it stays the next one.
        """
        left: dict[int, int] = {}
        classes: dict[int, tuple[bool, bool, int]] = {}
        for lane, each in self.items.items():
            if each.source == lane and (count := each.left):
                one_pass, left[lane] = each.one_pass, count
                classes[lane] = each.in_prompt, one_pass, self.shapes.of(one_pass).width(count)
        if not left:
            return None
        if self._takes_turns:
            left = dict(sorted(left.items(), key=lambda each: self._urgency(each[0])))
            chosen = classes[next(iter(left))]
        else:
            chosen = max(classes.values())
        prompt, one_pass, _ = chosen
        own = {lane: count for lane, count in left.items() if classes[lane] == chosen}
        batch = self.shapes.of(one_pass).next_batch(own, most)
        if batch is None:
            return None
        lanes, shape = batch
        tokens = {lane: self.items[lane].next(min(shape.width, left[lane])) for lane in lanes}
        ends = [lane for lane in lanes if prompt and self._ends_prompt(lane, tokens[lane])]
        return PrefillBatch(tokens, shape, prompt, ends)

    def _urgency(self, lane: int) -> tuple[int, int]:
        """Returns the sort key of a lane; equal lanes keep their order of arrival."""
        item = self.items[lane]
        return item.request.priority, item.rest if self._shortest_next else 0

    def _ends_prompt(self, lane: int, tokens: np.ndarray) -> bool:
        item = self.items[lane]
        return item.done + len(tokens) == len(item.prompt)

    def advance(self, batch: PrefillBatch) -> None:
        """Counts the tokens of a program that was launched."""
        self._shortest_next = not self._shortest_next
        for lane, tokens in batch.tokens.items():
            self.items[lane].done += len(tokens)

    def take_complete(self) -> dict[int, int]:
        """Removes the lanes that can decode; returns the lane that prefilled the prompt of each.

        If prefill and decoding do not alternate, returns all lanes once every prompt is done, and
        none earlier.
        """
        complete = {
            lane: each.source
            for lane, each in self.items.items()
            if not self.items[each.source].left
        }
        if not self._takes_turns and len(complete) < len(self.items):
            return {}
        self._drop(complete)
        return complete

    def _drop(self, lanes: Collection[int]) -> None:
        """Removes lanes; later requests do not share their prompts."""
        if not lanes:
            return
        for lane in lanes:
            del self.items[lane]
        self._first = {}
        for lane, each in self.items.items():
            if each.key is not None:
                self._first.setdefault(each.key, lane)


def prompt_key(policy: Policy, shard: int, request: Request, tokens: Sequence[int]) -> Hashable:
    """Returns a key that is equal for lanes whose prompts can share one prefill.

    If the policy's budget is a share of the longest length, that must be equal. Requests of
    different priorities share nothing: one that prefills for others must not be preempted first.

    Args:
      policy: the policy of the cache.
      shard: the part of the pages that the lane uses (`PageAllocator.shard_of`).
      request: the request.
      tokens: its prompt, perhaps with the answer that it had.
    """
    limited = policy.for_length(1) is not policy
    longest = request.max_length if limited else None
    return request.priority, request.adapter, shard, longest, tuple(tokens)
