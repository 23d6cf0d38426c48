"""Programs that were launched, and what is to be done with their results when they are read.

A prompt, the token after it and a chunk of steps run one behind the other on the device; the host
reads the results of the first two while the third one runs.
"""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np
from jaxtyping import Int, UInt32

from dms_jax.generation import sharing
from dms_jax.generation.batches import Extended
from dms_jax.generation.requests import Request, check_finite
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Filter


@dataclasses.dataclass
class Launched:
    """The launched programs of one call of an engine.

    Attributes:
      runner: the runner that launches them.
      last_tokens: Int[B], the newest token of each lane, on the device until it is read.
      drawn: lanes whose newest token is the first of an answer, and has not been read.
    """

    runner: Runner
    last_tokens: np.ndarray | jax.Array = dataclasses.field(init=False)
    drawn: frozenset[int] = frozenset()
    _unread: list[Callable[[], None]] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.last_tokens = np.zeros(len(self.runner.seen), np.int32)

    def read(self) -> None:
        """Waits for the programs, and records their results in order.

        Raises:
          CheckpointError: logits are not numbers.
        """
        unread, self._unread = self._unread, []
        for record in unread:
            record()
        self.drawn = frozenset()

    def ended(self, running: Mapping[int, Request], end_tokens: tuple[int, ...]) -> list[int]:
        """Reads, and returns the lanes that need no room because their first token ended them."""
        drawn = self.drawn
        self.read()
        return [
            lane
            for lane, request in running.items()
            if lane in drawn and request.generated[-1] in end_tokens
        ]

    def decoded(self, tokens: Int[np.ndarray, " B"]) -> None:
        """Sets the newest tokens after a chunk of steps.

        They go where the device had those before: elsewhere, programs are compiled once more.
        """
        before = self.last_tokens
        if isinstance(before, jax.Array) and before.committed:
            self.last_tokens = jax.device_put(tokens, before.sharding)
        else:
            self.last_tokens = tokens

    def prompts(self, extended: Extended, requests: Mapping[int, Request]) -> None:
        """Adds tokens that were launched to the use of the cache, when they are read.

        Args:
          extended: the result of the program.
          requests: lane -> the request to which its tokens belong.
        """

        def record() -> None:
            for lane, request in requests.items():
                live = extended.live[lane]
                request.meter.add(live, held=extended.held[lane])
                request.meter.prefilled += len(live)

        self._unread.append(record)

    def draw_first(
        self,
        source_of: Mapping[int, int],
        running: Mapping[int, Request],
        keys: UInt32[np.ndarray, "B n"],
        rule: Filter,
    ) -> None:
        """Draws the tokens after prompts; requests that have tokens continue from their last one.

        Args:
          source_of: lane -> the lane that read its prompt, itself or another one.
          running: lane -> its request.
          keys: random key data of every lane.
          rule: sampling settings.
        """
        last_tokens = np.array(self.last_tokens)
        continued = [lane for lane in source_of if running[lane].generated]
        last_tokens[continued] = [running[lane].generated[-1] for lane in continued]
        self.last_tokens = last_tokens
        fresh = {lane: source_of[lane] for lane in source_of if not running[lane].generated}
        if not fresh:
            return
        drawn = sharing.first_tokens(self.runner, fresh, last_tokens, keys, rule)
        requests = [(lane, running[lane], running[source]) for lane, source in fresh.items()]

        def record() -> None:
            tokens, logprobs, finite = jax.device_get(drawn)
            for lane, request, source in requests:
                check_finite(request, finite[lane])
                request.generated.append(int(tokens[lane]))
                if logprobs is not None:
                    request.logprobs.append(float(logprobs[lane]))
                if source is not request:
                    request.meter.fork(source.meter)

        self.last_tokens, self.drawn = drawn[0], frozenset(fresh)
        self._unread.append(record)
