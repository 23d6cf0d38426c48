"""Prompts on their way into the cache, a program at a time, and the requests that share one.

    lane 0   read 512 of 1300 tokens
    lane 1   shares the prompt of lane 0
    lane 2   read its prompt of 40; now the answer that it had before it was preempted
    lane 3   decodes: it is not here

A program runs tokens of one class: of prompts or of answers, which attend in one pass or one by
one, in one width. Where nothing else runs meanwhile, prompts come before answers, what attends in
one pass before the rest, and wide chunks before narrow ones, whose last parts then share programs.
Where answers are decoded between two programs, the classes take turns, so that a short prompt does
not wait for the end of a long one.
"""

import dataclasses
from collections.abc import Collection, Hashable, Mapping

import numpy as np

from dms_jax.generation.requests import Request
from dms_jax.generation.shapes import PromptShapes, Shape


@dataclasses.dataclass(eq=False)
class Part:
    """What a lane reads before it decodes.

    Attributes:
      request: the request in the lane.
      prompt: its prompt.
      answer: what it had generated when it was preempted, to be recomputed as an answer.
      whole: how many of the tokens of both attend in one pass, the first ones.
      shared: what requests have in common that read one prompt; None if it shares nothing.
      source: the lane that reads the prompt for it; None if it reads by itself.
      done: tokens that were launched.
    """

    request: Request
    prompt: list[int]
    answer: list[int]
    whole: int
    shared: Hashable = None
    source: int | None = None
    done: int = 0

    @property
    def in_prompt(self) -> bool:
        """Whether its next token belongs to its prompt."""
        return self.done < len(self.prompt)

    @property
    def one_pass(self) -> bool:
        """Whether its next token attends in one pass with others."""
        return self.done < self.whole

    @property
    def left(self) -> int:
        """Tokens of its prompt, or behind that of its answer, that were not launched.

        Behind those that attend in one pass it counts the others.
        """
        end = len(self.prompt)
        if self.done >= end:
            end += len(self.answer)
        return (self.whole if self.done < self.whole < end else end) - self.done

    def next(self, width: int) -> np.ndarray:
        """Returns its next `width` tokens, of which so many are `left`."""
        tokens, start = self.prompt, self.done
        if not self.in_prompt:
            tokens, start = self.answer, self.done - len(self.prompt)
        return np.asarray(tokens[start : start + width], np.int32)


@dataclasses.dataclass(frozen=True)
class Batch:
    """The next program.

    Attributes:
      tokens: lane -> its tokens.
      shape: shape of the program.
      prompt: whether they are tokens of prompts.
      ends_prompt: lanes whose prompt they complete.
    """

    tokens: dict[int, np.ndarray]
    shape: Shape
    prompt: bool
    ends_prompt: list[int]


class Reading:
    """The lanes that do not decode yet.

    Args:
      shapes: the shapes of programs.
      takes_turns: whether answers are decoded between two programs.

    Attributes:
      parts: lane -> what it reads, in the order in which they came.
    """

    def __init__(self, shapes: PromptShapes, *, takes_turns: bool):
        self.parts: dict[int, Part] = {}
        self._shapes, self._takes_turns = shapes, takes_turns
        self._last: tuple[bool, bool, int] | None = None  # class of the last program
        self._first: dict[Hashable, int] = {}  # the first lane of those that share a prompt

    def add(self, lane: int, part: Part) -> bool:
        """Lets a lane read its part; returns whether it does so itself, and no other one for it."""
        if part.shared is not None:
            first = self._first.setdefault(part.shared, lane)
            part.source = None if first == lane else first
        self.parts[lane] = part
        return part.source is None

    def keep(self, running: Mapping[int, Request]) -> None:
        """Forgets lanes whose requests have left them."""
        left = [lane for lane, each in self.parts.items() if running.get(lane) is not each.request]
        self._forget(left)

    def spared(self, cancelled: set[int]) -> set[int]:
        """Returns those of the requests whose prompts others share that were not cancelled."""
        sources = {
            each.source for each in self.parts.values() if each.request.index not in cancelled
        }
        found = {each.request.index for lane, each in self.parts.items() if lane in sources}
        return found & cancelled

    def next_batch(self) -> Batch | None:
        """Returns the next program; None if there is nothing to read."""
        left: dict[int, int] = {}
        classes: dict[int, tuple[bool, bool, int]] = {}
        for lane, each in self.parts.items():
            if each.source is None and (count := each.left):
                one_pass, left[lane] = each.one_pass, count
                classes[lane] = each.in_prompt, one_pass, self._shapes.of(one_pass).width(count)
        if not left:
            return None
        present = set(classes.values())
        if self._takes_turns and self._last is not None:
            present = {each for each in present if each < self._last} or present
        chosen = max(present)
        prompt, one_pass, _ = chosen
        lanes, shape = self._shapes.of(one_pass).next_batch(
            {lane: left[lane] for lane, own in classes.items() if own == chosen}
        )
        tokens = {lane: self.parts[lane].next(min(shape.width, left[lane])) for lane in lanes}
        ends = [lane for lane in lanes if prompt and self._ends_prompt(lane, tokens[lane])]
        return Batch(tokens, shape, prompt, ends)

    def _ends_prompt(self, lane: int, tokens: np.ndarray) -> bool:
        part = self.parts[lane]
        return part.done + len(tokens) == len(part.prompt)

    def advance(self, batch: Batch) -> None:
        """Counts the tokens of a program that was launched."""
        self._last = batch.prompt, batch.shape.one_pass, batch.shape.width
        for lane, tokens in batch.tokens.items():
            self.parts[lane].done += len(tokens)

    @property
    def copied(self) -> bool:
        """Whether a prompt is read for several lanes, which then need pages at once."""
        return any(each.source is not None for each in self.parts.values())

    def take_complete(self) -> dict[int, int]:
        """Removes the lanes that can decode; returns the lane that read the prompt of each.

        Where nothing is decoded meanwhile, they are all lanes, and none before.
        """
        complete = {
            lane: lane if each.source is None else each.source
            for lane, each in self.parts.items()
            if not self.parts[lane if each.source is None else each.source].left
        }
        if not self._takes_turns and len(complete) < len(self.parts):
            return {}
        self._forget(complete)
        return complete

    def _forget(self, lanes: Collection[int]) -> None:
        """Removes lanes; what comes later shares its prompt with none of them."""
        if not lanes:
            return
        for lane in lanes:
            del self.parts[lane]
        self._first = {}
        for lane, each in self.parts.items():
            if each.shared is not None:
                self._first.setdefault(each.shared, lane)
