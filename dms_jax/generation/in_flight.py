"""The queue of programs in flight, and how their results are recorded.

Prefill, first tokens and chunks of steps run one after the other on the device; the host collects
the results of each while the next one runs.
"""

import collections
import dataclasses
from collections.abc import Callable, Iterator, Mapping

import jax
import numpy as np
from jaxtyping import Int

from dms_jax.generation.checked_steps import CheckedSteps
from dms_jax.generation.grammar import OpeningMatcher, masks_of
from dms_jax.generation.programs import Steps
from dms_jax.generation.requests import Request, State, check_finite
from dms_jax.generation.runner import PrefillInFlight, Runner, StepsInFlight
from dms_jax.generation.sampling import Filter, Given

# From this many lanes on, end tokens are unlikely to end all answers within one chunk.
LANES_AHEAD = 4

# A long chunk is several programs. While the last one runs, the host collects the earlier ones,
# reuses the lanes of ended requests, and launches new prompts and the next steps. That takes as
# long as `_FEWEST_STEPS` steps of a small model.
_PROGRAMS, _FEWEST_STEPS = 4, 8


@dataclasses.dataclass
class InFlight:
    """The programs in flight of one call of an engine.

    Attributes:
      runner: the runner that launches them.
      end_tokens: token ids that end an answer.
      on_failure: called with a request whose grammar cannot be followed any further, and why.
      last_tokens: Int[B], the newest token of each lane, on the device until it is collected.
      drawn: lanes whose newest token is the first of an answer and still in flight.
      programs: programs of steps, oldest first, with the requests in their lanes.
      checked: the steps whose tokens are checked against grammars; None without any.
    """

    runner: Runner
    end_tokens: tuple[int, ...]
    on_failure: Callable[[Request, str], None]
    last_tokens: np.ndarray | jax.Array = dataclasses.field(init=False)
    drawn: frozenset[int] = frozenset()
    programs: collections.deque[tuple[StepsInFlight, dict[int, Request]]] = dataclasses.field(
        default_factory=collections.deque
    )
    checked: CheckedSteps | None = None
    _records: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    _prompts: list[Request] = dataclasses.field(default_factory=list)  # of the queued records

    def __post_init__(self):
        self.last_tokens = np.zeros(self.runner.num_lanes, np.int32)

    def collect_prompts(self) -> None:
        """Waits for prompts and first tokens, and records them in order.

        Raises:
          NotNumbersError: logits are not numbers.
        """
        records, self._records = self._records, []
        self._prompts = []
        for record in records:
            record()
        self.drawn = frozenset()
        self.runner.reservation.collect_prompts()

    def remaining(self, running: Mapping[int, Request]) -> Int[np.ndarray, " B"]:
        """Returns the most tokens that each lane may generate beyond those in flight."""
        remaining = np.zeros(self.runner.num_lanes, np.int64)
        for lane, request in running.items():
            remaining[lane] = request.remaining - (lane in self.drawn)
        return remaining - np.minimum(self.runner.reservation.steps_in_flight, remaining)

    def launch_steps(
        self,
        running: Mapping[int, Request],
        rule: Filter | None,
        num_steps: int,
        reserved: Int[np.ndarray, " B"],
        meanwhile: Iterator[None],
    ) -> None:
        """Launches a chunk of steps, while any lane may have a token to generate.

        Args:
          running: lane -> its request.
          rule: sampling settings; None if answers are given.
          num_steps: number of steps; see `steps_a_program`.
          reserved: number of steps for which each lane has pages.
          meanwhile: work of the host, in short parts, to do while it waits for tokens to check.
        """
        remaining = self.remaining(running)
        going = {lane: each for lane, each in running.items() if remaining[lane]}
        bound = {lane: each for lane, each in going.items() if each.matcher is not None}
        if self.runner.host is not None and bound:  # KCache's values are written between steps
            num_steps = 1
        if bound:
            assert rule is not None, "answers that are given have no grammar"
            if self.checked is None:
                self.checked = CheckedSteps(self.runner, self.end_tokens, self.on_failure)
            self.checked.run(
                running,
                self.last_tokens,
                np.minimum(remaining, reserved),  # steps taken back may have added to it
                rule,
                num_steps=num_steps,
                most=self.runner.checked_size(steps_a_program(self.runner, num_steps)),
                meanwhile=meanwhile,
            )
            self._take_checked()
            return
        self._settle()
        size = steps_a_program(self.runner, num_steps)
        for _ in range(0, num_steps, size):
            if not remaining.any():  # at once if only first tokens were asked for
                return
            program = self.runner.decode(
                self.last_tokens,
                remaining,
                rule or given_tokens(running, remaining, size),
                num_steps=size,
                end_tokens=self.end_tokens,
            )
            self.programs.append((program, dict(running)))
            self.last_tokens = program.newest
            remaining = np.maximum(remaining - size, 0)

    @property
    def has_steps(self) -> bool:
        """Whether steps are in flight or not collected."""
        return bool(self.programs) or self.is_checking

    @property
    def is_checking(self) -> bool:
        """Whether steps are in flight whose tokens are not checked yet."""
        return self.checked is not None and self.checked.in_flight

    def _settle(self) -> None:
        """Waits for steps whose tokens are not checked yet."""
        if self.checked is not None and self.checked.in_flight:
            self.checked.settle(self.last_tokens)
            self._take_checked()

    def _take_checked(self) -> None:
        """Adds the steps that are checked to the programs in flight."""
        assert self.checked is not None
        if (steps := self.checked.take()) is not None:
            self.programs.append((steps, dict(self.checked.requests)))
        self.last_tokens = self.checked.newest

    def close(self) -> None:
        """Waits for a running check, also after an error."""
        if self.checked is not None:
            self.checked.close()

    def may_run_on(self, running: Mapping[int, Request]) -> bool:
        """Whether programs of steps may stay in flight while their results are not needed.

        False if all answers may have ended, so that the device would run for nothing; and with
        KCache, whose values are written between programs. The device does not know of stop strings:
        an answer that one ended runs on, its results are dropped, and the next request in its lane
        runs after it.
        """
        going = int(np.count_nonzero(self.remaining(running)))
        return self.runner.host is None and going >= (LANES_AHEAD if self.end_tokens else 1)

    def collect_steps(self, count: int | None = None) -> None:
        """Waits for the oldest `count` programs of steps, all if None, and records them in order.

        Raises:
          NotNumbersError: logits are not numbers.
        """
        if count is None:
            self._settle()
            count = len(self.programs)
        for _ in range(count):
            program, running = self.programs.popleft()
            steps = self.runner.collect(program)
            # else later programs were launched or tokens drawn
            if self.last_tokens is program.newest:
                self.last_tokens = steps.tokens[-1]
            record_steps(steps, running)

    def add_prefill(self, program: PrefillInFlight, requests: Mapping[int, Request]) -> None:
        """Records the cache use of a prefill program when it is collected.

        Args:
          program: the program.
          requests: lane -> the request whose tokens it ran.
        """

        def record() -> None:
            for lane, (live, held, left) in program.usage().items():
                meter = requests[lane].meter
                meter.add((int(live.max()), int(live[-1])), held=held)
                meter.finish(left)  # the next token may come after a stop string
                meter.prefilled += len(live)

        self._records.append(record)
        self._prompts += requests.values()

    @property
    def reads_on(self) -> bool:
        """Whether prompts are in flight and every one of them needs further programs."""
        unread = not self.drawn and bool(self._prompts)
        return unread and all(each.state is State.PREFILL for each in self._prompts)

    def launch_first_tokens(
        self,
        source_of: Mapping[int, int],
        running: Mapping[int, Request],
        rule: Filter | None,
    ) -> None:
        """Draws first tokens; requests that have tokens continue from their last one.

        Args:
          source_of: lane -> the lane that prefilled its prompt, itself or another one.
          running: lane -> its request.
          rule: sampling settings; None if answers are given.
        """
        if continued := [lane for lane in source_of if running[lane].generated]:
            last_tokens = np.array(self.last_tokens)  # waits for the steps in flight
            last_tokens[continued] = [running[lane].generated[-1] for lane in continued]
            self.last_tokens = last_tokens
        bound = {lane: each for lane in source_of if (each := running[lane].matcher) is not None}
        for lane, matcher in bound.items():  # a matcher may have consumed tokens that were lost
            matcher.restart(running[lane].generated[:-1])
        fresh = {lane: source_of[lane] for lane in source_of if not running[lane].generated}
        if not fresh:
            return
        chosen = rule or given_tokens(running, self.remaining(running), 1)
        begun = {lane: matcher for lane, matcher in bound.items() if lane in fresh}
        if isinstance(chosen, Filter) and begun:
            size = self.runner.model.config.vocab_size
            masks = masks_of(begun, self.runner.num_lanes, size)
            chosen = dataclasses.replace(chosen, allowed=masks)
        self.last_tokens, drawn = self.runner.first_tokens(fresh, self.last_tokens, chosen)
        requests = [(lane, running[lane], running[source]) for lane, source in fresh.items()]

        def record() -> None:
            found = jax.device_get(drawn)
            check_finite((request, found.finite[lane]) for lane, request, _ in requests)
            for lane, request, source in requests:
                request.generated.append(int(found.tokens[lane]))
                if found.logprobs is not None:
                    request.logprobs.append(float(found.logprobs[lane]))
                if found.greedy is not None:
                    request.greedy &= bool(found.greedy[lane])
                if isinstance(request.matcher, OpeningMatcher):
                    best = int(found.likeliest[lane]), float(found.highest[lane])
                    request.likeliest.append(best)
                if source is not request:
                    request.meter.fork(source.meter)
                request.prompt_peak = request.meter.peak

        assert not self.drawn, "first tokens are collected before others are launched"
        self.drawn = frozenset(fresh)
        self._records.append(record)


def steps_a_program(runner: Runner, num_steps: int) -> int:
    """Returns the steps of each program of a chunk of `num_steps` steps."""
    if runner.host is not None:  # KCache's values are written between programs
        return num_steps
    least = min(num_steps, max(_FEWEST_STEPS, num_steps // _PROGRAMS))
    return next(size for size in range(least, num_steps + 1) if num_steps % size == 0)


def record_steps(steps: Steps, running: Mapping[int, Request]) -> None:
    """Adds the steps of a program to the running requests; each lane ran a prefix of them.

    Raises:
      NotNumbersError: logits are not numbers; then nothing is added.
    """
    counts = steps.ran.sum(0).tolist()
    if not (steps.finite | ~steps.ran).all():
        check_finite((each, steps.finite[: counts[lane], lane]) for lane, each in running.items())
    tokens, totals = steps.tokens.T.tolist(), np.stack([steps.live, steps.reads])
    logprobs = None if steps.logprobs is None else steps.logprobs.T.tolist()
    for lane, request in running.items():
        count = counts[lane]
        if not count:
            continue
        request.generated += tokens[lane][:count]
        request.steps.append(totals[:, :count, lane])
        if logprobs is not None:
            request.logprobs += logprobs[lane][:count]
        if steps.greedy is not None:
            request.greedy &= bool(steps.greedy[:count, lane].all())
        if isinstance(request.matcher, OpeningMatcher):
            best = steps.likeliest[:count, lane].tolist(), steps.highest[:count, lane].tolist()
            request.likeliest += zip(*best, strict=True)


def given_tokens(
    running: Mapping[int, Request], remaining: Int[np.ndarray, " B"], count: int
) -> Given:
    """Returns the next `count` tokens of each lane whose answer is given (`Request.given`).

    Args:
      running: lane -> its request.
      remaining: tokens of each lane that were not launched.
      count: tokens of a lane.
    """
    tokens = np.zeros((count, len(remaining)), np.int32)
    for lane, request in running.items():
        assert request.given is not None
        start = len(request.given) - int(remaining[lane])
        some = request.given[start : start + count]
        tokens[: len(some), lane] = some
    return Given(tokens)
