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
    """A chunk of steps of which some lanes have a grammar or an opening; see the module docstring.

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
        self._undo = runner.blank_undo
        self._refused = 0.0  # share of the last checked tokens
        self.steps, self.tail = list[Packed](), None
        self.redrawn, self._unread = list[Redrawn](), list[Redrawn]()
        self.void = list[Bool[np.ndarray, " B"]]()
        self.newest: Any = runner.everywhere(tokens)
        self.error: GrammarError | None = None

    def run(self, num_steps: int, table: Array) -> None:
        """Launches up to C steps; returns when the tokens of all are known and checked.

        Args:
          num_steps: number of steps (C).
          table: the page table on the device.
        """
        first = self.newest
        takes_back = no_lanes = np.zeros(len(self._ended), bool)
        unchecked: _Step | None = None
        with use_mesh(self._runner.model.mesh):
            try:
                for number in range(num_steps):
                    ahead = self._undo is not None and self._refused < MOST_REFUSED
                    if unchecked is not None and not (ahead and number < num_steps - 1):
                        refused = self._check(unchecked)
                        self._redraw(unchecked, refused)
                        unchecked = None
                    if not (self._going.any() or takes_back.any()):
                        break
                    step = self._launch(number, table, takes_back)
                    takes_back = no_lanes
                    if number == 0:
                        self._consume_first(np.asarray(first))
                    if unchecked is not None:
                        takes_back = self._check(unchecked)
                        self._redraw(unchecked, takes_back)
                        step.void[:] = takes_back
                        self._taken = self._taken - (takes_back & step.active)
                    unchecked = step
                if unchecked is not None:
                    self._redraw(unchecked, self._check(unchecked, last=True))
            except GrammarError as raised:
                self.error = raised
                assert unchecked is not None
                del self.steps[unchecked.number :], self.void[unchecked.number :]

    @property
    def _going(self) -> Bool[np.ndarray, " B"]:
        return (self._taken < self._remaining) & ~self._ended

    def _launch(self, number: int, table: Array, takes_back: Bool[np.ndarray, " B"]) -> _Step:
        runner, active = self._runner, self._going
        forced = np.full(len(active), -1, np.int32)
        for lane, request in self._answers.items():
            if isinstance(request.matcher, OpeningMatcher) and active[lane]:
                request.matcher.read()
                if (only := request.matcher.only) is not None:
                    forced[lane] = only
        left = np.where(active, self._remaining - self._taken, 0)
        left = left + programs.ENDLESS * self._endless
        control = np.stack([left, forced, takes_back]).astype(np.int32)
        given = table, self._undo, self.newest, control, self._seeds
        runner.cache, result, newest, source, self._undo, self.tail = programs.step(
            *runner.cached, *given, runner.traced_policy, self._rule, self._end_tokens
        )
        self.newest = runner.everywhere(newest)
        self.newest.copy_to_host_async()
        result.words.copy_to_host_async()
        self.steps.append(result)
        self._taken = self._taken + active
        self.void.append(np.zeros_like(active))
        return _Step(number, self.newest, source, active, self.void[-1])

    def _consume_first(self, tokens: Int[np.ndarray, " B"]) -> None:
        """Consumes the tokens that were drawn before the chunk."""
        ends = np.isin(tokens, self._end_tokens) & ~self._endless
        self._ended |= ends
        for lane, matcher in self._matchers(self._taken > 0):
            if not ends[lane]:
                matcher.consume(int(tokens[lane]))

    def _matchers(self, lanes: Bool[np.ndarray, " B"]) -> Iterator[tuple[int, Matcher]]:
        """Yields those of some lanes that have a grammar."""
        for lane, request in self._answers.items():
            if lanes[lane] and isinstance(request.matcher, Matcher):
                yield lane, request.matcher

    def _check(self, step: _Step, *, last: bool = False) -> Bool[np.ndarray, " B"]:
        """Waits for the tokens of a step; returns the lanes whose grammar does not allow theirs.

        Other matchers consume their tokens, unless they are the `last` ones: the matcher of a
        request at rest has not consumed its newest token.

        Raises:
          GrammarError: a grammar has become too complex.
        """
        while not step.newest.is_ready() and next(self._meanwhile, _DONE) is not _DONE:
            pass
        tokens = np.asarray(step.newest)
        for redrawn in self._unread:
            self._consume_redrawn(redrawn)
        self._unread.clear()
        checked = step.active & ~step.void & ~self._ended
        ends = np.isin(tokens, self._end_tokens) & ~self._endless
        refused, wrong, count = np.zeros_like(checked), [], 0
        every, is_end = tokens.tolist(), ends.tolist()
        for lane, matcher in self._matchers(checked):
            count += 1
            if is_end[lane]:
                refused[lane] = not matcher.may_end
            elif last:
                refused[lane] = not matcher.allows(every[lane])
            else:
                refused[lane] = not matcher.try_consume(every[lane])
            if matcher.error is not None:
                wrong.append(lane)
        self._ended |= checked & ends & ~refused
        self._refused = refused.sum() / count if count else 0.0
        if wrong:
            self._raise(wrong)
        return refused

    def _consume_redrawn(self, redrawn: Redrawn) -> None:
        tokens, _ = redrawn.read()
        for lane, token in zip(redrawn.lanes.tolist(), tokens.tolist(), strict=True):
            if token in self._end_tokens:
                self._ended[lane] = True
            else:
                self._answers[lane].matcher.consume(token)

    def _raise(self, lanes: list[int]) -> None:
        error = self._answers[lanes[0]].matcher.error
        raise GrammarError(
            f"The grammar of an answer cannot be followed to its end: {error}. Give a simpler one.",
            (self._answers[lane].index for lane in lanes),
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
        if wrong := [lane for lane in lanes.tolist() if self._answers[lane].matcher.error]:
            self._raise(wrong)
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
