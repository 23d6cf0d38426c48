"""Decode steps whose tokens the host checks against grammars.

What a grammar allows next depends on the token before, which is drawn on the device, and a mask of
the whole vocabulary takes the host ten times as long as a check of one token. So each step draws
freely, and the host checks its tokens while the next step already runs with them. A lane whose
token is not allowed takes that next step back, its token is drawn again under a mask, and it is one
step late. Other lanes do not notice:

    device | step 1 | step 2 | draw again: lane 5 | step 3: lane 5 runs step 2 again | ...
    host            | check 1: lane 5, a mask | launch | check 2 | launch | ...

Two steps are in flight without a check, also between two chunks, while the engine records results,
sends text and admits requests. `CheckedSteps.settle` ends that, where the engine needs all results.

A token that was drawn freely and is allowed, else one drawn among the allowed ones, is distributed
like one drawn among the allowed ones. With top-k, top-p or min-p the first draw filters the whole
vocabulary, and the second one the allowed tokens.

The check comes before the next step under a policy whose steps cannot be taken back
(`Policy.can_undo`), and while most tokens are refused.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from dms_jax.generation import programs
from dms_jax.generation.grammar import GrammarError, Matcher, OpeningMatcher, mask_words
from dms_jax.generation.programs import Packed, Steps
from dms_jax.generation.runner import Runner, StepsInFlight
from dms_jax.generation.sampling import Filter
from dms_jax.model.language_model import use_mesh

# Lanes whose tokens are drawn again in a small program; if they are more, all lanes are in it.
FEW = 16
# Share of refused tokens from which the next step waits for the check: half of it would be void.
MOST_REFUSED = 0.5
_DONE = object()
_thread = concurrent.futures.ThreadPoolExecutor(1, "dms_jax grammars")

# Lanes to draw again, their entries in the result, and the lane of each entry of the program.
Redrawing = tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], Int[np.ndarray, " m"]]


@dataclasses.dataclass(frozen=True)
class Redrawn:
    """Tokens that were drawn again.

    Attributes:
      lanes: their lanes.
      entries: their entries in the result.
      result: the tokens and, if asked for, their log-probabilities, on the device.
    """

    lanes: Int[np.ndarray, " n"]
    entries: Int[np.ndarray, " n"]
    result: Packed

    def read(self) -> tuple[Int[np.ndarray, " n"], Any]:
        """Waits for the tokens; returns them with their log-probabilities or None."""
        tokens, logprobs = self.result.read()
        return tokens[self.entries], None if logprobs is None else logprobs[self.entries]

    def of(self, lanes: Bool[np.ndarray, " B"]) -> "Redrawn":
        """Returns those of some lanes."""
        kept = lanes[self.lanes]
        return Redrawn(self.lanes[kept], self.entries[kept], self.result)


@dataclasses.dataclass
class _Step:
    """A launched step.

    Attributes:
      result: its results on the device.
      newest: Int[B] on the device, its tokens.
      source: what they were drawn from.
      tail: the values that the host must write, if it holds any.
      before: Int[B], the newest tokens before it.
      begins: lanes whose matcher has not consumed that token.
      redrawn_before: tokens that were drawn again since the step before was launched.
      active: lanes that take part, unless the token before has ended them.
      void: lanes that take it back, or that were released since.
      check: the check of its tokens, once that has begun.
      redrawn: its tokens that were drawn again.
    """

    result: Packed
    newest: Array
    source: programs.DrawInputs
    tail: Any
    before: Any
    begins: Bool[np.ndarray, " B"]
    redrawn_before: list[Redrawn]
    active: Bool[np.ndarray, " B"]
    void: Bool[np.ndarray, " B"]
    check: concurrent.futures.Future | None = None
    redrawn: Redrawn | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked(StepsInFlight):
    """Consecutive steps whose tokens are checked, a program each.

    Attributes:
      results: the packed `programs.Steps` of each step, on the device.
      void: Bool[B] for each step, the lanes that took it back.
      redrawn: for each step the tokens that replace its own.
      ended: lanes whose answer is known to have ended, and which are idle since.
    """

    results: list[Packed]
    void: list[Bool[np.ndarray, " B"]]
    redrawn: list[Redrawn | None]
    ended: Bool[np.ndarray, " B"]

    def read(self) -> tuple[Steps, Bool[np.ndarray, " B"]]:
        return self._corrected([each.read() for each in self.results]), self.ended

    def _corrected(self, parts: Sequence[Steps]) -> Steps:
        """Joins the results of the steps, with the final tokens and without void steps.

        Each lane's own steps come first, in order, as in a chunk of other steps: a lane may take
        steps back, or join in the middle.
        """
        each = [dataclasses.replace(part, lengths=None, frozen=None) for part in parts]
        steps = jax.tree.map(lambda *arrays: np.concatenate(arrays), *each)
        found = {name: getattr(steps, name) for name in ("tokens", "logprobs")}
        for number, redrawn in enumerate(self.redrawn):
            if redrawn is not None:
                for (name, old), new in zip(found.items(), redrawn.read(), strict=True):
                    if old is not None:
                        found[name] = old = old.copy()
                        old[number, redrawn.lanes] = new
        steps = dataclasses.replace(steps, **found)
        void, lengths, frozen = np.stack(self.void), parts[-1].lengths, parts[-1].frozen
        steps = dataclasses.replace(steps, ran=steps.ran & ~void)
        if not (void.any() or (steps.ran[1:] & ~steps.ran[:-1]).any()):
            return dataclasses.replace(steps, lengths=lengths, frozen=frozen)
        # After its own steps the last one again, as for a lane that has ended.
        order = np.argsort(~steps.ran, axis=0, kind="stable")
        last = np.maximum(steps.ran.sum(0) - 1, 0)
        order = np.take_along_axis(order, np.minimum(np.arange(len(order))[:, None], last), 0)
        ran = np.sort(~steps.ran, axis=0) == 0
        if len(parts) > 1:  # no lane takes back two steps in sequence
            lengths = np.where(void[-1][:, None], parts[-2].lengths, lengths)
        if frozen is not None:  # without steps that were taken back they are less
            frozen = np.where(void.any(0)[:, None], 0, frozen)
        steps = jax.tree.map(lambda x: np.take_along_axis(x, order, 0), steps)
        return dataclasses.replace(steps, ran=ran, lengths=lengths, frozen=frozen)


class CheckedSteps:
    """The decode steps of a call in which some lanes have a grammar or an opening.

    Args:
      runner: the runner.
      end_tokens: token ids that end an answer.

    Attributes:
      newest: Int[B] on the device, the newest token of each lane.
      requests: lane -> its request.
    """

    def __init__(self, runner: Runner, end_tokens: tuple[int, ...]):
        self._runner, self._end_tokens = runner, end_tokens
        nobody = np.zeros(runner.num_lanes, bool)
        self.requests: dict[int, Any] = {}
        self._endless, self._epochs = nobody, runner.reservation.epochs
        self._launched = collections.deque[_Step]()  # not checked yet, at most two
        self._ready = list[_Step]()  # checked
        self._undo, self._program = runner.blank_undo, None
        self._takes_back = nobody  # lanes that take back the last step in the next one
        self._ended = nobody  # lanes whose answer has ended
        self._consumed = nobody  # lanes whose matcher has consumed the newest token
        self._unread = list[Redrawn]()  # since the last launch
        self._refused = 0.0  # share of the last checked tokens
        self.newest: Any = None

    @property
    def in_flight(self) -> bool:
        """Whether there are steps without a check."""
        return bool(self._launched)

    def run(
        self,
        running: Mapping[int, Any],
        tokens: Int[np.ndarray | Array, " B"],
        remaining: Int[np.ndarray, " B"],
        rule: Filter,
        *,
        num_steps: int,
        meanwhile: Iterator[None],
    ) -> None:
        """Launches up to C steps; the last two may be in flight when it returns.

        Args:
          running: lane -> its request.
          tokens, remaining, rule: see `Runner.decode`.
          num_steps: number of steps (C).
          meanwhile: work of the host, in short parts, to do while it waits for tokens.

        Raises:
          GrammarError: a grammar has become too complex; the steps from there on are dropped.
        """
        self._seeds, self._rule = self._runner.seeds, rule
        if self._runner.model.mesh is None:  # arrays are sent once for all steps
            self._seeds, self._rule = jax.tree.map(
                lambda x: jax.device_put(x) if isinstance(x, np.ndarray) else x, (self._seeds, rule)
            )
        self._table, self._own_table = self._runner.table_of_steps(remaining > 0)
        self._outer = self._runner.model.transformer.without_layers()
        self._remaining, self._taken = remaining, np.zeros_like(remaining)
        self._endless, self.newest = self._runner.endless, self._runner.everywhere(tokens)
        self._drop_released()
        self.requests, self._program = dict(running), None
        matchers = [(lane, each.matcher) for lane, each in running.items()]
        self._grammars = [each for each in matchers if isinstance(each[1], Matcher)]
        self._openings = [each for each in matchers if isinstance(each[1], OpeningMatcher)]
        with use_mesh(self._runner.model.mesh):
            for _ in range(num_steps):
                ahead = self._undo is not None and self._refused < MOST_REFUSED
                self._resolve(1 if ahead else 0, self._going, meanwhile)
                if not (self._going.any() or self._takes_back.any()):
                    return
                self._launch(self._going)

    def settle(self, tokens: Int[np.ndarray | Array, " B"]) -> None:
        """Waits for all steps and checks their tokens.

        Args:
          tokens: the newest tokens of all lanes.

        Raises:
          GrammarError: see `run`.
        """
        nobody = np.zeros_like(self._ended)
        self.newest = self._runner.everywhere(tokens)
        self._drop_released()
        self._program = None
        with use_mesh(self._runner.model.mesh):
            self._resolve(0, nobody, iter(()))
            if self._takes_back.any():
                self._launch(nobody)
                self._launched.clear()
        self._consumed = nobody

    def take(self) -> Checked | None:
        """Returns the checked steps since the last call; None without any."""
        steps, self._ready = self._ready, []
        if not steps:
            return None
        return Checked(
            most=np.sum([each.active for each in steps], axis=0, dtype=np.int64),
            epochs=self._runner.reservation.epochs,
            tail=steps[-1].tail,
            table=self._own_table,
            results=[each.result for each in steps],
            void=[each.void for each in steps],
            redrawn=[each.redrawn for each in steps],
            ended=self._ended,
        )

    def close(self) -> None:
        """Waits for a running check, whose matchers others may use next."""
        for step in self._launched:
            if step.check is not None:
                step.check.exception()

    @property
    def _going(self) -> Bool[np.ndarray, " B"]:
        """The lanes that take part in the next step; all of them have pages for it."""
        return (self._taken < self._remaining) & (self._remaining > 0) & ~self._ended

    def _drop_released(self) -> None:
        """Drops the tokens of lanes that were released since the last step."""
        epochs = self._runner.reservation.epochs
        kept, self._epochs = self._epochs == epochs, epochs
        for step in self._launched:
            step.active, step.begins = step.active & kept, step.begins & kept
            step.void = step.void | ~kept
        self._takes_back, self._ended = self._takes_back & kept, self._ended & kept
        self._consumed = self._consumed & kept
        self._unread = [each.of(kept) for each in self._unread]

    def _launch(self, active: Bool[np.ndarray, " B"]) -> None:
        runner, last = self._runner, self._launched[-1] if self._launched else None
        forced = np.full(len(active), -1, np.int32)
        for lane, matcher in self._openings:
            if active[lane]:
                matcher.read()
                if (only := matcher.only) is not None:
                    forced[lane] = only
        left = np.where(active, self._remaining - self._taken, 0)
        left = left + programs.ENDLESS * self._endless
        control = np.stack([left, forced, self._takes_back]).astype(np.int32)
        given = self._table, self._undo, self.newest, control, self._seeds
        args = *runner.cached, *given, runner.traced_policy, self._rule, self._end_tokens
        if self._program is None:
            self._program = programs.step.chosen(*args)
        before, consumed = self.newest, self._consumed if last is None else last.active
        runner.cache, result, newest, source, self._undo, tail = self._program(*args)
        self.newest = runner.everywhere(newest)
        self.newest.copy_to_host_async()
        result.words.copy_to_host_async()
        runner.reservation.add_steps(active.astype(np.int64))
        self._taken, self._takes_back = self._taken + active, np.zeros_like(active)
        redrawn_before, self._unread = self._unread, []
        step = _Step(
            result=result,
            newest=self.newest,
            source=source,
            tail=tail,
            before=before,
            begins=active & ~consumed,
            redrawn_before=redrawn_before,
            active=active,
            void=np.zeros_like(active),
        )
        self._launched.append(step)
        if last is not None:
            self._begin_check(last, active)

    def _begin_check(self, step: _Step, goes_on: Bool[np.ndarray, " B"]) -> None:
        """Begins to check the tokens of a step in a thread.

        `goes_on` are the lanes that take part in the step after it.
        """
        self._consumed = step.active & goes_on
        given = self._ended, self._endless, goes_on, self._grammars, self.requests
        step.check = _thread.submit(self._check, step, *given)

    def _resolve(
        self, left: int, goes_on: Bool[np.ndarray, " B"], meanwhile: Iterator[None]
    ) -> None:
        """Waits for the checks of all steps but the last `left`, and draws refused tokens again."""
        while len(self._launched) > left:
            step = self._launched[0]
            if step.check is None:
                self._begin_check(step, goes_on)
            assert step.check is not None
            while not step.check.done() and next(meanwhile, _DONE) is not _DONE:
                pass
            try:
                refused, ended, self._refused = step.check.result()
                refused = refused & step.active & ~step.void
                masks = self._masks(refused)
            except GrammarError:
                self._launched.clear()
                raise
            self._launched.popleft()
            self._ready.append(step)
            self._ended = self._ended | (ended & (step.active | step.begins))
            for later in self._launched:  # at most one
                self._takes_back = self._takes_back | refused
                self._taken = self._taken - (refused & later.active)
                later.void, later.active = later.void | refused, later.active & ~ended
            if masks is not None:
                self._redraw(step, *masks)

    def _check(
        self,
        step: _Step,
        ended_before: Bool[np.ndarray, " B"],
        endless: Bool[np.ndarray, " B"],
        goes_on: Bool[np.ndarray, " B"],
        grammars: list[tuple[int, Matcher]],
        requests: Mapping[int, Any],
    ) -> tuple[Bool[np.ndarray, " B"], Bool[np.ndarray, " B"], float]:
        """Waits for the tokens of a step, and checks them.

        Matchers consume the tokens with which their lanes go on: that of a lane at rest has not
        consumed the newest one.

        Args:
          step: the step.
          ended_before: lanes whose answer has ended before.
          endless: lanes that ignore end tokens.
          goes_on: lanes that take part in the step after it.
          grammars: lanes with their matchers.
          requests: lane -> its request.

        Returns:
          The lanes whose grammar does not allow the token, those whose answer has ended, and the
          share of refused tokens.

        Raises:
          GrammarError: a grammar has become too complex.
        """
        active, void = step.active, step.void  # the arrays are replaced, not changed
        matchers, ended = dict(grammars), np.zeros_like(ended_before)
        if step.begins.any():
            tokens = np.asarray(step.before)
            ended |= step.begins & np.isin(tokens, self._end_tokens) & ~endless
            for lane in np.flatnonzero(step.begins & ~ended).tolist():
                if lane in matchers:
                    matchers[lane].consume(int(tokens[lane]))
        for redrawn in step.redrawn_before:
            for lane, token in zip(redrawn.lanes.tolist(), redrawn.read()[0].tolist(), strict=True):
                if active[lane] and token in self._end_tokens:
                    ended[lane] = True
                elif active[lane] and not step.begins[lane] and lane in matchers:
                    matchers[lane].consume(token)
        tokens = np.asarray(step.newest)
        checked, refused = active & ~void & ~ended_before & ~ended, np.zeros_like(ended)
        ends = np.isin(tokens, self._end_tokens) & ~endless
        lanes, every = checked.tolist(), tokens.tolist()
        is_end, going = ends.tolist(), goes_on.tolist()
        for lane, matcher in grammars:
            if lanes[lane]:
                if is_end[lane]:
                    allowed = matcher.may_end
                elif going[lane]:
                    allowed = matcher.try_consume(every[lane])
                else:
                    allowed = matcher.allows(every[lane])
                refused[lane] = not allowed
        here = np.flatnonzero(refused & step.active)  # lanes may be released meanwhile
        _raise_errors([requests[lane] for lane in here.tolist()])
        count = sum(lanes[lane] for lane, _ in grammars)
        return refused, ended | (checked & ends & ~refused), refused.sum() / max(count, 1)

    def _masks(self, refused: Bool[np.ndarray, " B"]) -> tuple[Redrawing, np.ndarray] | None:
        """Returns which tokens to draw again, and their masks; None if there are none.

        Raises:
          GrammarError: a grammar has become too complex.
        """
        if not refused.any():
            return None
        lanes, num_lanes = np.flatnonzero(refused).astype(np.int32), len(refused)
        few = len(lanes) <= FEW < num_lanes
        entries = np.arange(len(lanes), dtype=np.int32) if few else lanes
        lane_of = np.full(FEW if few else num_lanes, num_lanes, np.int32)
        lane_of[entries] = lanes
        masks = np.full(
            (len(lane_of), mask_words(self._runner.model.config.vocab_size)), -1, np.int32
        )
        for entry, lane in zip(entries.tolist(), lanes.tolist(), strict=True):
            self.requests[lane].matcher.fill(masks[entry])
        _raise_errors([self.requests[lane] for lane in lanes.tolist()])
        return (lanes, entries, lane_of), masks

    def _redraw(self, step: _Step, which: Redrawing, masks: Int[np.ndarray, "m words"]) -> None:
        """Draws tokens of a step again, under masks, into the newest tokens."""
        lanes, entries, lane_of = which
        given = self.newest, lane_of, masks, self._seeds, self._rule
        result, newest = programs.redraw(self._outer, step.source, *given)
        self.newest = self._runner.everywhere(newest)
        result.words.copy_to_host_async()
        step.redrawn = Redrawn(lanes, entries, result)
        self._unread.append(step.redrawn)


def _raise_errors(requests: Sequence[Any]) -> None:
    """Raises GrammarError if matchers of some requests have failed."""
    if wrong := [each for each in requests if each.matcher.error is not None]:
        raise GrammarError(
            "The grammar of an answer cannot be followed to its end: "
            f"{wrong[0].matcher.error}. Give a simpler one.",
            (each.index for each in wrong),
        )
