"""Decode steps whose tokens the host checks against grammars.

What a grammar allows next depends on the token before, which is drawn on the device, and a mask of
the whole vocabulary takes the host ten times as long as a check of one token. So steps draw freely,
several in a program, and the host checks their tokens while the next program already runs with
them. A lane whose token is not allowed takes its steps after that token back, and the token is
drawn again under a mask. Other lanes do not notice:

    device | steps 1-8 | steps 9-16 | draw 3 again: lane 5  | steps 17-24; lane 5 runs steps 4-11
    host               | check 1-8: lane 5 refuses 3, mask  | check 9-16, but not of lane 5 | ...

While a program is checked, the next one runs. Between two chunks two programs are in flight: the
engine records results, sends text and admits requests meanwhile. `CheckedSteps.settle` checks these
too, where the engine needs all results.

To take steps back, a program keeps the state of each row after each step, and what the slots held
that its steps may overwrite (`programs.Trail`).

A lane whose grammar has become too complex takes no further steps, and its answer ends.

A token that was drawn freely and is allowed, else one drawn among the allowed ones, is distributed
like one drawn among the allowed ones. With top-k, top-p or min-p the first draw filters the whole
vocabulary, and the second one the allowed tokens.

Programs have one step while more than a few tokens are refused, and no more steps than the window
under a policy that evicts after one (`Runner.checked_size`). The check comes before the next step
under a policy whose steps cannot be taken back (`Policy.can_undo`), and while most tokens are
refused.
"""

import collections
import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Int

from dms_jax.generation import programs
from dms_jax.generation.grammar import Matcher, OpeningMatcher, mask_words
from dms_jax.generation.programs import Packed, Steps
from dms_jax.generation.runner import Runner, StepsInFlight
from dms_jax.generation.sampling import Filter
from dms_jax.model.language_model import use_mesh

# Lanes whose tokens are drawn again in a small program; if they are more, all lanes are in it.
FEW = 16
# Share of refused tokens up to which a program has several steps. A refusal voids the steps of its
# lane after it in two programs, 12 of 16 on average.
FEW_REFUSED = 0.03
# Share from which the next step waits for the check: half of it would be void.
MOST_REFUSED = 0.5
# Part of the last check in these shares.
_NEWEST = 0.25
_DONE = object()
_thread = concurrent.futures.ThreadPoolExecutor(1, "dms_jax grammars")


@dataclasses.dataclass(frozen=True)
class Redrawn:
    """Tokens that were drawn again.

    Attributes:
      lanes: their lanes.
      steps: their steps in the program.
      entries: their entries in the result.
      result: the tokens, their log-probabilities, if asked for, and the lengths of the lanes' rows,
        on the device.
    """

    lanes: Int[np.ndarray, " n"]
    steps: Int[np.ndarray, " n"]
    entries: Int[np.ndarray, " n"]
    result: Packed


@dataclasses.dataclass
class _Program:
    """A launched program of C steps.

    Attributes:
      size: number of steps (C).
      result: its results on the device.
      trail: what tokens are drawn again from, until they are.
      tail: the values that the host must write, if it holds any.
      before: Int[B], the newest tokens before it.
      begins: lanes whose matcher has not consumed that token.
      most: Int[B], the most steps that each lane takes.
      kept: Int[B], the first steps that each lane does not take back; all of a lane that was
        released.
      check: the check of its tokens, once that has begun.
      redrawn: its tokens that were drawn again.
    """

    size: int
    result: Packed
    trail: programs.Trail | None
    tail: Any
    before: Any
    begins: Bool[np.ndarray, " B"]
    most: Int[np.ndarray, " B"]
    kept: Int[np.ndarray, " B"]
    check: concurrent.futures.Future | None = None
    redrawn: Redrawn | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked(StepsInFlight):
    """Consecutive programs of steps whose tokens are checked.

    Attributes:
      programs: the programs.
      ended: lanes whose answer is known to have ended, and which are idle since.
    """

    programs: list[_Program]
    ended: Bool[np.ndarray, " B"]

    def read(self) -> tuple[Steps, Bool[np.ndarray, " B"]]:
        parts, lengths, frozen = list[Steps](), None, None
        for each in self.programs:
            part, kept = each.result.read(), each.kept
            ran = part.ran & (np.arange(each.size)[:, None] < kept)
            took = ran.any(0)[:, None]
            lengths = part.lengths if lengths is None else np.where(took, part.lengths, lengths)
            if part.frozen is not None:  # less after a step back; it grows with the next steps
                found = np.where((kept < each.size)[:, None], 0, part.frozen)
                frozen = found if frozen is None else np.where(took, found, frozen)
            part = dataclasses.replace(part, ran=ran, lengths=None, frozen=None)
            if (redrawn := each.redrawn) is not None:
                part, lengths = _with_redrawn(part, lengths, redrawn)
            parts.append(part)
        parts = _with_likeliest(parts)
        steps = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
        return dataclasses.replace(_in_order(steps), lengths=lengths, frozen=frozen), self.ended


def _with_redrawn(
    steps: Steps, lengths: Int[np.ndarray, "L B K"], redrawn: Redrawn
) -> tuple[Steps, Int[np.ndarray, "L B K"]]:
    """Replaces tokens of a program by those drawn again, and lengths by those at these steps."""
    tokens, logprobs, left = redrawn.result.read()
    place, found = (redrawn.steps, redrawn.lanes), {"tokens": tokens, "logprobs": logprobs}
    for name, new in found.items():
        if new is not None:
            found[name] = getattr(steps, name).copy()
            found[name][place] = new[redrawn.entries]
    lengths = lengths.copy()
    lengths[:, redrawn.lanes] = left[:, redrawn.entries]
    return dataclasses.replace(steps, **found), lengths


def _with_likeliest(parts: list[Steps]) -> list[Steps]:
    """Gives all programs the likeliest tokens if some have them; else zeros, which nobody reads."""
    if all(each.likeliest is None for each in parts):
        return parts
    return [
        dataclasses.replace(
            each,
            likeliest=np.zeros_like(each.tokens),
            highest=np.zeros(each.tokens.shape, np.float32),
        )
        if each.likeliest is None
        else each
        for each in parts
    ]


def _in_order(steps: Steps) -> Steps:
    """Puts each lane's own steps first, in order, as in a chunk of other steps.

    A lane may take steps back, or join in the middle.
    """
    if not (steps.ran[1:] & ~steps.ran[:-1]).any():
        return steps
    # After its own steps the last one again, as for a lane that has ended.
    order = np.argsort(~steps.ran, axis=0, kind="stable")
    last = np.maximum(steps.ran.sum(0) - 1, 0)
    order = np.take_along_axis(order, np.minimum(np.arange(len(order))[:, None], last), 0)
    ran = np.sort(~steps.ran, axis=0) == 0
    steps = jax.tree.map(lambda x: np.take_along_axis(x, order, 0), steps)
    return dataclasses.replace(steps, ran=ran)


class CheckedSteps:
    """The decode steps of a call in which some lanes have a grammar or an opening.

    Args:
      runner: the runner.
      end_tokens: token ids that end an answer.
      on_failure: called with a request whose grammar cannot be followed any further, and why.

    Attributes:
      newest: Int[B] on the device, the newest token of each lane.
      requests: lane -> its request.
    """

    def __init__(
        self, runner: Runner, end_tokens: tuple[int, ...], on_failure: Callable[[Any, str], None]
    ):
        self._runner, self._end_tokens, self._on_failure = runner, end_tokens, on_failure
        nobody = np.zeros(runner.num_lanes, bool)
        self.requests: dict[int, Any] = {}
        self._endless, self._epochs = nobody, runner.reservation.epochs
        self._launched = collections.deque[_Program]()  # not checked yet, at most two
        self._ready = list[_Program]()  # checked
        self._ended = nobody  # lanes whose answer has ended
        # Lanes whose matcher will have consumed the newest token after all checks.
        self._consumed = nobody
        self._refused = 0.0  # share of the tokens, lately
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
        most: int,
        meanwhile: Iterator[None],
    ) -> None:
        """Launches up to `num_steps` steps; the last two programs may be in flight afterwards.

        Args:
          running: lane -> its request.
          tokens, remaining, rule: see `Runner.decode`.
          num_steps: number of steps.
          most: the most steps of a program; divides `num_steps`.
          meanwhile: work of the host, in short parts, to do while it waits for tokens.
        """
        self._seeds, self._rule = self._runner.seeds, rule
        if self._runner.model.mesh is None:  # arrays are sent once for all steps
            self._seeds, self._rule = jax.device_put((self._seeds, rule))
        self._table, self._own_table = self._runner.table_of_steps(remaining > 0)
        self._outer = self._runner.model.transformer.without_layers()
        self._remaining, self._taken = remaining, np.zeros_like(remaining)
        self._endless, self.newest = self._runner.endless, self._runner.everywhere(tokens)
        self._drop_released()
        self.requests, self._chosen = dict(running), {}
        matchers = [(lane, each.matcher) for lane, each in running.items()]
        self._grammars = [each for each in matchers if isinstance(each[1], Matcher)]
        self._openings = [each for each in matchers if isinstance(each[1], OpeningMatcher)]
        left = num_steps
        with use_mesh(self._runner.model.mesh):
            while left:
                ahead = self._runner.takes_back and self._refused < MOST_REFUSED
                size = most if self._refused < FEW_REFUSED and most <= left else 1
                if not self._runner.appends:  # both programs in flight have as many steps
                    ahead = ahead and all(each.size == size for each in self._launched)
                self._resolve(1 if ahead else 0, meanwhile)
                if not self._going.any():
                    return
                self._launch(self._going, size)
                left -= size

    def settle(self, tokens: Int[np.ndarray | Array, " B"]) -> None:
        """Waits for all steps and checks their tokens.

        Args:
          tokens: the newest tokens of all lanes.
        """
        self.newest = self._runner.everywhere(tokens)
        self._drop_released()
        with use_mesh(self._runner.model.mesh):
            self._resolve(0, iter(()))

    def take(self) -> Checked | None:
        """Returns the checked steps since the last call; None without any."""
        checked, self._ready = self._ready, []
        if not checked:
            return None
        return Checked(
            most=np.sum([each.most for each in checked], axis=0, dtype=np.int64),
            epochs=self._runner.reservation.epochs,
            tail=checked[-1].tail,
            table=self._own_table,
            programs=checked,
            ended=self._ended,
        )

    def close(self) -> None:
        """Waits for a running check, whose matchers others may use next."""
        for each in self._launched:
            if each.check is not None:
                each.check.exception()

    @property
    def _going(self) -> Bool[np.ndarray, " B"]:
        """The lanes that take part in the next steps; all of them have pages for these."""
        return (self._taken < self._remaining) & ~self._ended

    def _drop_released(self) -> None:
        """Drops the tokens of lanes that were released since the last step."""
        epochs = self._runner.reservation.epochs
        current, self._epochs = self._epochs == epochs, epochs
        for each in (*self._launched, *self._ready):
            each.most, each.kept = each.most * current, each.kept * current
            each.begins = each.begins & current
        self._ended, self._consumed = self._ended & current, self._consumed & current

    def _launch(self, going: Bool[np.ndarray, " B"], size: int) -> None:
        runner = self._runner
        left = np.where(going, self._remaining - self._taken, 0)
        most = np.minimum(left, size)
        checks = programs.Checks()
        if self._openings:
            forced = np.full((size, len(left)), -1, np.int32)
            for lane, matcher in self._openings:
                tokens = matcher.force(int(most[lane]))
                forced[: len(tokens), lane] = tokens
            checks = programs.Checks(forced)
        left = (left + programs.ENDLESS * self._endless).astype(np.int32)
        given = self._table, self.newest, left, self._seeds, runner.traced_policy, self._rule
        args = *runner.cached, *given, size, self._end_tokens, checks
        if size not in self._chosen:
            self._chosen[size] = programs.decode.chosen(*args)
        before = self.newest
        runner.cache, result, newest, tail, trail = self._chosen[size](*args)
        self.newest = runner.everywhere(newest)
        for each in (self.newest, result.words):
            each.copy_to_host_async()
        runner.reservation.add_steps(most.astype(np.int64))
        self._taken = self._taken + most
        last = self._launched[-1] if self._launched else None
        self._launched.append(
            _Program(
                size=size,
                result=result,
                trail=trail,
                tail=tail,
                before=before,
                begins=going & ~self._consumed,
                most=most,
                kept=np.full_like(most, size),
            )
        )
        self._consumed = self._consumed | going
        if last is not None:
            self._begin_check(last)

    def _begin_check(self, program: _Program) -> None:
        """Begins to check the tokens of a program in a thread."""
        program.check = _thread.submit(self._check, program, self._endless, self._grammars)

    def _resolve(self, left: int, meanwhile: Iterator[None]) -> None:
        """Checks all programs but the last `left`, and draws refused tokens again."""
        while len(self._launched) > left:
            program = self._launched[0]
            if program.check is None:
                self._begin_check(program)
            assert program.check is not None
            while not program.check.done() and next(meanwhile, _DONE) is not _DONE:
                pass
            places, ended, share = program.check.result()
            refused = (places < program.kept) & (program.most > 0)
            masks = self._masks(refused)
            failed = refused.copy()
            failed[[*masks]] = False
            self._launched.popleft()
            self._ready.append(program)
            if share is not None:
                self._refused += _NEWEST * (share - self._refused)
            self._ended = self._ended | (ended & (program.most > 0)) | failed
            self._consumed = self._consumed & ~refused
            own = places + ~failed  # with the token that is drawn again
            void = np.where(refused, program.most - own, 0)
            program.kept = np.where(refused, own, program.kept)
            for later in self._launched:  # at most one
                void = void + later.most * refused
                later.kept, later.begins = later.kept * ~refused, later.begins & ~refused
            self._taken = self._taken - void
            if masks:
                self._redraw(program, places, masks)
            program.trail = None  # its memory

    def _check(
        self,
        program: _Program,
        endless: Bool[np.ndarray, " B"],
        grammars: list[tuple[int, Matcher]],
    ) -> tuple[Int[np.ndarray, " B"], Bool[np.ndarray, " B"], float | None]:
        """Waits for the tokens of a program, and checks them.

        Matchers consume the tokens up to an end token or a refused one.

        Args:
          program: the program.
          endless: lanes that ignore end tokens.
          grammars: lanes with their matchers.

        Returns:
          The step of each lane's first refused token, C for none; the lanes whose answer has ended;
          and the share of refused tokens, None without any token of a grammar.
        """
        # The arrays are replaced meanwhile, not changed.
        begins, takes, size = program.begins, (program.most > 0) & (program.kept > 0), program.size
        steps, places = program.result.read(), np.full(len(takes), program.size)
        counts, rows, every = steps.ran.sum(0), steps.tokens.T.tolist(), np.arange(len(takes))
        last = steps.tokens[np.maximum(counts - 1, 0), every]
        if begins.any():
            before = np.asarray(program.before)
            last = np.where(begins & (counts == 0), before, last)
        is_end = np.isin(last, self._end_tokens) & ~endless
        total = 0
        for lane, matcher in grammars:
            if not takes[lane]:
                continue
            count, ends = int(counts[lane]), bool(is_end[lane])
            if begins[lane] and (count or not ends):
                matcher.consume(int(before[lane]))
            if not count:
                continue
            tokens = rows[lane][: count - ends]
            allowed = matcher.consume_allowed(tokens)
            if allowed < len(tokens) or (ends and not matcher.may_end):
                places[lane] = allowed
            total += count
        refused = takes & (places < size)
        ended = is_end & takes & ~refused
        return places, ended, refused.sum() / total if total else None

    def _masks(self, refused: Bool[np.ndarray, " B"]) -> dict[int, Int[np.ndarray, " words"]]:
        """Returns the masks of tokens to draw again, by lane; none for a lane that has failed."""
        masks, words = {}, mask_words(self._runner.model.config.vocab_size)
        for lane in np.flatnonzero(refused).tolist():
            request, mask = self.requests[lane], np.full(words, -1, np.int32)
            request.matcher.fill(mask)
            if (error := request.matcher.error) is None:
                masks[lane] = mask
            else:
                self._on_failure(request, error)
        return masks

    def _redraw(
        self,
        program: _Program,
        places: Int[np.ndarray, " B"],
        masks: Mapping[int, Int[np.ndarray, " words"]],
    ) -> None:
        """Draws tokens of a program again under masks, and takes the steps after them back.

        Args:
          program: the program; at most one was launched after it.
          places: the step of each lane's refused token.
          masks: the tokens that each lane may take.
        """
        lanes, num_lanes = np.fromiter(masks, np.int32), len(places)
        few = len(lanes) <= FEW < num_lanes
        entries = np.arange(len(lanes), dtype=np.int32) if few else lanes
        lane_of = np.full(FEW if few else num_lanes, num_lanes, np.int32)
        lane_of[entries] = lanes
        allowed = np.full((len(lane_of), len(masks[int(lanes[0])])), -1, np.int32)
        allowed[entries] = [*masks.values()]
        refused = np.zeros((3, len(lane_of)), np.int32)
        refused[0], refused[1, entries], refused[2] = lane_of, places[lanes], bool(self._launched)
        trail, later, table = program.trail, None, None
        assert trail is not None
        if trail.overwritten is not None:
            table = self._table
            later = self._launched[-1].trail if self._launched else trail
        given = table, trail, later, self.newest, refused, allowed
        runner = self._runner
        runner.cache, result, newest = programs.redraw(
            self._outer, runner.cache, *given, self._seeds, self._rule
        )
        self.newest = runner.everywhere(newest)
        for each in (self.newest, result.words):
            each.copy_to_host_async()
        program.redrawn = Redrawn(lanes, places[lanes], entries, result)
