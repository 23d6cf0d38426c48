"""Programs that were launched, and what is to be done with their results when they are read.

A prompt, the token after it and chunks of steps run one behind the other on the device; the host
reads the results of each while the next one runs.
"""

import collections
import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jaxtyping import Int, UInt32

from dms_jax.generation import sharing
from dms_jax.generation.batches import Extended, LaunchedSteps
from dms_jax.generation.reporting import record_steps
from dms_jax.generation.requests import Request, check_finite
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Filter

# Of so many answers with end tokens it is unlikely that all end within one chunk.
LANES_AHEAD = 4

# A long chunk of steps is several programs. While the last one runs, the results of those before it
# are read, lanes that ended are given away, and prompts of newcomers and the next steps are
# launched, which together take the host as long as so many steps of a small model.
_PROGRAMS, _FEWEST_STEPS = 4, 8


@dataclasses.dataclass
class Launched:
    """The launched programs of one call of an engine.

    Attributes:
      runner: the runner that launches them.
      end_tokens: token ids that end an answer.
      last_tokens: Int[B], the newest token of each lane, on the device until it is read.
      drawn: lanes whose newest token is the first of an answer, and has not been read.
      chunks: programs of steps that were not read, oldest first, and the requests in their lanes.
    """

    runner: Runner
    end_tokens: tuple[int, ...]
    last_tokens: np.ndarray | jax.Array = dataclasses.field(init=False)
    drawn: frozenset[int] = frozenset()
    chunks: collections.deque[tuple[LaunchedSteps, dict[int, Request]]] = dataclasses.field(
        default_factory=collections.deque
    )
    _unread: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.last_tokens = np.zeros(len(self.runner.seen), np.int32)

    def read(self) -> None:
        """Waits for prompts and first tokens, and records them in order.

        Raises:
          NotNumbersError: logits are not numbers.
        """
        unread, self._unread = self._unread, []
        for record in unread:
            record()
        self.drawn = frozenset()
        self.runner.read_prompts()

    def remaining(self, running: Mapping[int, Request]) -> Int[np.ndarray, " B"]:
        """Returns the most tokens that each lane may generate after what was launched."""
        remaining = np.zeros(len(self.runner.seen), np.int64)
        for lane, request in running.items():
            remaining[lane] = request.remaining - (lane in self.drawn)
        return remaining - np.minimum(self.runner.unread, remaining)

    def decode(
        self,
        running: Mapping[int, Request],
        seeds: UInt32[np.ndarray, "B 2"],
        rule: Filter,
        num_steps: int,
    ) -> None:
        """Launches a chunk of steps behind the others, while any lane may have a token to generate.

        Args:
          running: lane -> its request.
          seeds: see `programs.request_keys`.
          rule: sampling settings.
          num_steps: number of steps, in programs of `steps_a_program`.
        """
        size = self.steps_a_program(num_steps)
        for _ in range(0, num_steps, size):
            remaining = self.remaining(running)
            if not remaining.any():  # at once where first tokens were all that was asked for
                return
            chunk = self.runner.decode(
                self.last_tokens,
                remaining,
                seeds,
                rule,
                num_steps=size,
                end_tokens=self.end_tokens,
            )
            self.chunks.append((chunk, dict(running)))
            self.last_tokens = chunk.newest

    def steps_a_program(self, num_steps: int) -> int:
        """Returns the steps of each program of a chunk of so many."""
        if self.runner.host is not None:  # KCache's values are written between programs
            return num_steps
        least = min(num_steps, max(_FEWEST_STEPS, num_steps // _PROGRAMS))
        return next(size for size in range(least, num_steps + 1) if num_steps % size == 0)

    def reserve_ahead(self, running: Mapping[int, Request], num_steps: int) -> bool:
        """Reserves pages for another chunk behind one that was not read, if that costs nothing.

        Returns False, and reserves nothing, where it would: if all answers may have ended, and the
        device would run steps for none of them; if the pool is so full that lengths must be exact;
        if the rows could need a wider table, whose program is compiled anew. KCache's values are
        written between programs.
        """
        remaining = self.remaining(running)
        if not self._goes_on(remaining) or self.runner.host is not None:
            return False
        extra = np.minimum(remaining, num_steps)
        if not (self.runner.fits(extra) and self.runner.fits_table(extra)):
            return False
        self.runner.reserve(extra)
        return True

    def _goes_on(self, remaining: Int[np.ndarray, " B"]) -> bool:
        """Whether enough lanes may have tokens to generate after what was launched."""
        return int(np.count_nonzero(remaining)) >= (LANES_AHEAD if self.end_tokens else 1)

    def may_run_on(self, running: Mapping[int, Request]) -> bool:
        """Whether the last program of a chunk may run while those that wait are admitted.

        An answer that a stop string ends, which is only in the text, goes on in it. Whoever gets
        its lane and its pages is read behind it, and what it did there is dropped. KCache's values
        are written between programs.
        """
        return self.runner.host is None and self._goes_on(self.remaining(running))

    def read_steps(self) -> None:
        """Waits for every program of steps, and records them in order; see `read_chunk`."""
        while self.chunks:
            self.read_chunk()

    def read_chunk(self) -> None:
        """Waits for the oldest program of steps, and records it.

        Raises:
          NotNumbersError: logits are not numbers.
        """
        chunk, running = self.chunks.popleft()
        steps = self.runner.read(chunk)
        if self.last_tokens is chunk.newest:  # else more was launched, or drawn, behind it
            self.last_tokens = steps.tokens[-1]
        record_steps(steps, running)

    def prompts(self, extended: Extended, requests: Mapping[int, Request]) -> None:
        """Adds tokens that were launched to the use of the cache, when they are read.

        Args:
          extended: the result of the program.
          requests: lane -> the request to which its tokens belong.
        """

        def record() -> None:
            for lane, request in requests.items():
                live = extended.live[lane].tolist()
                request.meter.add(live, held=extended.held[lane])
                request.meter.finish(extended.left[lane])  # the next token may be beyond a stop
                request.meter.prefilled += len(live)

        self._unread.append(record)

    def draw_first(
        self,
        source_of: Mapping[int, int],
        running: Mapping[int, Request],
        seeds: UInt32[np.ndarray, "B 2"],
        rule: Filter,
    ) -> None:
        """Draws the tokens after prompts; requests that have tokens continue from their last one.

        Args:
          source_of: lane -> the lane that read its prompt, itself or another one.
          running: lane -> its request.
          seeds: see `programs.request_keys`.
          rule: sampling settings.
        """
        if continued := [lane for lane in source_of if running[lane].generated]:
            last_tokens = np.array(self.last_tokens)  # waits for the steps that run on
            last_tokens[continued] = [running[lane].generated[-1] for lane in continued]
            self.last_tokens = last_tokens
        fresh = {lane: source_of[lane] for lane in source_of if not running[lane].generated}
        if not fresh:
            return
        drawn = sharing.first_tokens(self.runner, fresh, self.last_tokens, seeds, rule)
        requests = [(lane, running[lane], running[source]) for lane, source in fresh.items()]

        def record() -> None:
            tokens, logprobs, finite = jax.device_get(drawn)
            check_finite((request, finite[lane]) for lane, request, _ in requests)
            for lane, request, source in requests:
                request.generated.append(int(tokens[lane]))
                if logprobs is not None:
                    request.logprobs.append(float(logprobs[lane]))
                if source is not request:
                    request.meter.fork(source.meter)
                request.prompt_peak = request.meter.peak

        self.last_tokens, self.drawn = drawn[0], frozenset(fresh)
        self._unread.append(record)
