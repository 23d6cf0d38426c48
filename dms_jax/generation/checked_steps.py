"""Decode steps whose tokens the host checks against grammars.

What a grammar allows next depends on the token before, which is drawn on the device, and a mask of
the whole vocabulary takes the host ten times as long as a check of one token. So each step draws
freely, and the host checks its tokens while the next step already runs with them. A lane whose
token is not allowed takes that next step back, its token is drawn again under a mask, and it is one
step late. Other lanes do not notice:

    device | step 1 | step 2 | draw again: lane 5 | step 3: lane 5 runs step 2 again | ...
    host            | check 1: lane 5, a mask | launch | check 2 | launch | ...

A token that was drawn freely and is allowed, else one drawn among the allowed ones, is distributed
like one drawn among the allowed ones. With top-k, top-p or min-p the first draw filters the whole
vocabulary, and the second one the allowed tokens.

The check comes before the next step under a policy whose steps cannot be taken back
(`Policy.can_undo`), before the last step of a chunk, and while most tokens are refused.
"""

import concurrent.futures
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from dms_jax.generation import programs
from dms_jax.generation.grammar import GrammarError, Matcher, OpeningMatcher, mask_words
from dms_jax.generation.programs import Packed, Steps
from dms_jax.generation.sampling import Filter
from dms_jax.model.language_model import use_mesh

if TYPE_CHECKING:
    from dms_jax.generation.runner import Runner

# Lanes whose tokens are drawn again in a small program; if they are more, all lanes are in it.
FEW = 16
# Share of refused tokens from which the next step waits for the check: half of it would be void.
MOST_REFUSED = 0.5
_DONE = object()


@dataclasses.dataclass(frozen=True)
class Redrawn:
    """Tokens that were drawn again.

    Attributes:
      step: the step that had drawn them first.
      lanes: their lanes.
      entries: their entries in the result.
      result: the tokens and, if asked for, their log-probabilities, on the device.
    """

    step: int
    lanes: Int[np.ndarray, " n"]
    entries: Int[np.ndarray, " n"]
    result: Packed

    def read(self) -> tuple[Int[np.ndarray, " n"], Any]:
        """Waits for the tokens; returns them with their log-probabilities or None."""
        tokens, logprobs = self.result.read()
        return tokens[self.entries], None if logprobs is None else logprobs[self.entries]


@dataclasses.dataclass
class _Step:
    """A launched step.

    Attributes:
      number: its number in the chunk.
      newest: Int[B] on the device, its tokens.
      source: what they were drawn from.
      active: lanes that take part, unless the token before has ended them.
      void: lanes that take it back.
    """

    number: int
    newest: Array
    source: programs.Source
    active: Bool[np.ndarray, " B"]
    void: Bool[np.ndarray, " B"]


class CheckedSteps:
    """A chunk of decode steps in which some lanes have a grammar or an opening.

    Args:
      runner: the runner; pages must be reserved.
      answers: lane -> its request, if that has a matcher.
      tokens, remaining, seeds, rule, end_tokens, endless: see `Runner.decode`.
      meanwhile: work of the host, in short parts, to do while it waits for tokens.

    Attributes:
      steps: the results of the steps on the device, without those after an error.
      redrawn: tokens to replace in them.
      void: Bool[B] for each step, the lanes that took it back.
      newest: Int[B] on the device, the newest token of each lane.
      tail: the values that the host must write, if it holds any.
      error: why no more steps could be launched; None if all were.
    """

    def __init__(
        self,
        runner: "Runner",
        answers: Mapping[int, Any],
        tokens: Int[np.ndarray | Array, " B"],
        remaining: Int[np.ndarray, " B"],
        seeds: UInt32[np.ndarray, "B 2"],
        rule: Filter,
        *,
        end_tokens: tuple[int, ...],
        endless: Bool[np.ndarray, " B"],
        meanwhile: Iterator[None],
    ):
        self._runner, self._answers, self._remaining = runner, answers, remaining
        self._end_tokens, self._endless, self._meanwhile = end_tokens, endless, meanwhile
        self._seeds, self._rule = runner.send((seeds, rule))
        self._outer = runner.model.transformer.without_layers()
        self._taken = np.zeros_like(remaining)  # steps of each lane, without those taken back
        self._ended = np.zeros(len(remaining), bool)
        matchers = [(lane, each.matcher) for lane, each in answers.items()]
        self._grammars = [each for each in matchers if isinstance(each[1], Matcher)]
        self._openings = [each for each in matchers if isinstance(each[1], OpeningMatcher)]
        self._undo, self._program = runner.blank_undo, None
        self._refused = 0.0  # share of the last checked tokens
        self.steps, self.tail = list[Packed](), None
        self.redrawn, self._unread = list[Redrawn](), list[Redrawn]()
        # Those with which a step was launched, and the lanes that took part in it.
        self._read = list[tuple[Redrawn, Bool[np.ndarray, " B"]]]()
        self.void = list[Bool[np.ndarray, " B"]]()
        self.newest: Any = runner.everywhere(tokens)
        self.error: GrammarError | None = None

    def run(self, num_steps: int, table: Array) -> None:
        """Launches up to C steps; returns when the tokens of all are known and checked.

        Args:
          num_steps: number of steps (C).
          table: the page table on the device.
        """
        first, takes_back = self.newest, np.zeros(len(self._ended), bool)
        unchecked: _Step | None = None
        mesh = self._runner.model.mesh
        with use_mesh(mesh), concurrent.futures.ThreadPoolExecutor(1) as self._thread:
            try:
                for number in range(num_steps):
                    ahead = self._undo is not None and self._refused < MOST_REFUSED
                    if unchecked is not None and not (ahead and number < num_steps - 1):
                        self._redraw(unchecked, self._wait(self._begin_check(unchecked)))
                        unchecked = None
                    if not (self._going.any() or takes_back.any()):
                        break
                    check = None if unchecked is None else self._begin_check(unchecked)
                    step = self._launch(number, table, takes_back)
                    takes_back = np.zeros_like(takes_back)
                    if number == 0:
                        self._consume_first(np.asarray(first))
                    if unchecked is not None and check is not None:
                        takes_back = step.void[:] = self._wait(check)
                        self._taken = self._taken - (takes_back & step.active)
                        self._redraw(unchecked, takes_back)
                    unchecked = step
                if unchecked is not None:
                    check = self._begin_check(unchecked, last=True)
                    self._redraw(unchecked, self._wait(check))
            except GrammarError as raised:
                self.error = raised
                assert unchecked is not None
                del self.steps[unchecked.number :], self.void[unchecked.number :]

    @property
    def _going(self) -> Bool[np.ndarray, " B"]:
        """The lanes that take part in the next step."""
        return (self._taken < self._remaining) & ~self._ended

    def _launch(self, number: int, table: Array, takes_back: Bool[np.ndarray, " B"]) -> _Step:
        runner, active = self._runner, self._going
        forced = np.full(len(active), -1, np.int32)
        for lane, matcher in self._openings:
            if active[lane]:
                matcher.read()
                if (only := matcher.only) is not None:
                    forced[lane] = only
        left = np.where(active, self._remaining - self._taken, 0)
        left = left + programs.ENDLESS * self._endless
        control = np.stack([left, forced, takes_back]).astype(np.int32)
        given = table, self._undo, self.newest, control, self._seeds
        args = *runner.cached, *given, runner.traced_policy, self._rule, self._end_tokens
        if self._program is None:
            self._program = programs.step.chosen(*args)
        runner.cache, result, newest, source, self._undo, self.tail = self._program(*args)
        self.newest = runner.everywhere(newest)
        self.newest.copy_to_host_async()
        result.words.copy_to_host_async()
        self.steps.append(result)
        self._taken = self._taken + active
        self._read += [(each, active) for each in self._unread]
        self._unread = []
        self.void.append(np.zeros_like(active))
        return _Step(number, self.newest, source, active, self.void[-1])

    def _consume_first(self, tokens: Int[np.ndarray, " B"]) -> None:
        """Consumes the tokens that were drawn before the chunk."""
        ends = np.isin(tokens, self._end_tokens) & ~self._endless
        self._ended = self._ended | ends
        for lane, matcher in self._grammars:
            if self._taken[lane] and not ends[lane]:
                matcher.consume(int(tokens[lane]))

    def _begin_check(self, step: _Step, *, last: bool = False) -> concurrent.futures.Future:
        """Begins to check the tokens of a step in a thread, while the next one is launched."""
        goes_on = np.zeros_like(self._ended) if last else self._going
        read, self._read = self._read, []
        return self._thread.submit(self._check, step, self._ended, goes_on, read)

    def _wait(self, check: concurrent.futures.Future) -> Bool[np.ndarray, " B"]:
        """Returns the lanes whose grammar does not allow the token."""
        while not check.done() and next(self._meanwhile, _DONE) is not _DONE:
            pass
        refused, self._ended, self._refused = check.result()
        return refused

    def _check(
        self,
        step: _Step,
        ended: Bool[np.ndarray, " B"],
        goes_on: Bool[np.ndarray, " B"],
        read: list[tuple[Redrawn, Bool[np.ndarray, " B"]]],
    ) -> tuple[Bool[np.ndarray, " B"], Bool[np.ndarray, " B"], float]:
        """Waits for the tokens of a step, and checks them.

        Matchers consume the tokens with which their lanes go on: that of a lane at rest has not
        consumed the newest one.

        Args:
          step: the step.
          ended: lanes whose answer has ended.
          goes_on: lanes that take part in the step after it.
          read: tokens that were drawn again before it, with the lanes that took part in it.

        Returns:
          The lanes whose grammar does not allow the token, `ended`, and the share of refused ones.

        Raises:
          GrammarError: a grammar has become too complex.
        """
        tokens = np.asarray(step.newest)
        for redrawn, active in read:
            ended = ended | self._consume_redrawn(redrawn, active)
        checked, refused = step.active & ~step.void & ~ended, np.zeros_like(ended)
        ends = np.isin(tokens, self._end_tokens) & ~self._endless
        lanes, every = checked.tolist(), tokens.tolist()
        is_end, going = ends.tolist(), goes_on.tolist()
        for lane, matcher in self._grammars:
            if lanes[lane]:
                if is_end[lane]:
                    allowed = matcher.may_end
                elif going[lane]:
                    allowed = matcher.try_consume(every[lane])
                else:
                    allowed = matcher.allows(every[lane])
                refused[lane] = not allowed
        self._raise_errors(np.flatnonzero(refused))
        count = sum(lanes[lane] for lane, _ in self._grammars)
        return refused, ended | (checked & ends & ~refused), refused.sum() / max(count, 1)

    def _consume_redrawn(
        self, redrawn: Redrawn, active: Bool[np.ndarray, " B"]
    ) -> Bool[np.ndarray, " B"]:
        """Consumes tokens that were drawn again; returns the lanes that they end."""
        ended = np.zeros_like(active)
        tokens, _ = redrawn.read()
        for lane, token in zip(redrawn.lanes.tolist(), tokens.tolist(), strict=True):
            if token in self._end_tokens:
                ended[lane] = True
            elif active[lane]:
                self._answers[lane].matcher.consume(token)
        return ended

    def _raise_errors(self, lanes: Int[np.ndarray, " n"]) -> None:
        wrong = [self._answers[lane] for lane in lanes.tolist()]
        if wrong := [each for each in wrong if each.matcher.error is not None]:
            raise GrammarError(
                "The grammar of an answer cannot be followed to its end: "
                f"{wrong[0].matcher.error}. Give a simpler one.",
                (each.index for each in wrong),
            )

    def _redraw(self, step: _Step, refused: Bool[np.ndarray, " B"]) -> None:
        """Draws the tokens of some lanes again, under masks, into the newest tokens."""
        if not refused.any():
            return
        lanes, num_lanes = np.flatnonzero(refused).astype(np.int32), len(refused)
        few = len(lanes) <= FEW < num_lanes
        entries = np.arange(len(lanes), dtype=np.int32) if few else lanes
        lane_of = np.full(FEW if few else num_lanes, num_lanes, np.int32)
        lane_of[entries] = lanes
        masks = np.full(
            (len(lane_of), mask_words(self._runner.model.config.vocab_size)), -1, np.int32
        )
        for entry, lane in zip(entries.tolist(), lanes.tolist(), strict=True):
            self._answers[lane].matcher.fill(masks[entry])
        self._raise_errors(lanes)
        given = self.newest, lane_of, masks, self._seeds, self._rule
        result, newest = programs.redraw(self._outer, step.source, *given)
        self.newest = self._runner.everywhere(newest)
        result.words.copy_to_host_async()
        redrawn = Redrawn(step.number, lanes, entries, result)
        self.redrawn.append(redrawn)
        self._unread.append(redrawn)

    def corrected(self, steps: Steps) -> Steps:
        """Returns the results of the steps, read, with the final tokens and without void steps."""
        found = {name: getattr(steps, name) for name in ("tokens", "logprobs")}
        for redrawn in self.redrawn:
            if redrawn.step < len(self.steps):
                for (name, old), new in zip(found.items(), redrawn.read(), strict=True):
                    if old is not None:
                        found[name] = old = old.copy()
                        old[redrawn.step, redrawn.lanes] = new
        steps = dataclasses.replace(steps, **found)
        void = np.stack(self.void)
        if not void.any():
            return steps
        steps = dataclasses.replace(steps, ran=steps.ran & ~void)
        # Each lane's steps first, in order; then its last one again, as for a lane that has ended.
        order = np.argsort(~steps.ran, axis=0, kind="stable")
        last = np.maximum(steps.ran.sum(0) - 1, 0)
        order = np.take_along_axis(order, np.minimum(np.arange(len(order))[:, None], last), 0)
        lengths, ran = steps.lengths, np.sort(~steps.ran, axis=0) == 0
        steps = jax.tree.map(
            lambda x: np.take_along_axis(x, order, 0), dataclasses.replace(steps, lengths=None)
        )
        return dataclasses.replace(steps, ran=ran, lengths=lengths)
