"""Room for requests: a free lane and the pages of its next chunks, or the error that says why not.

Of some requests it is known before they run that they never fit: every row takes the first chunk of
a prompt, a prompt that is read whole lies in the pool whole, and a policy that drops nothing holds
the answer too.
"""

import collections
import dataclasses
from collections.abc import Container, Sequence

import numpy as np

from dms_jax.errors import CapacityError
from dms_jax.generation.requests import Request
from dms_jax.generation.runner import Runner


@dataclasses.dataclass(frozen=True)
class Room:
    """Finds places in the cache of a runner.

    Attributes:
      runner: whose lanes and pages they are.
      chunk: decode steps per compiled program.
      prefill_chunk: prompt tokens of a sequence per compiled program.
    """

    runner: Runner
    chunk: int
    prefill_chunk: int

    def check(self, requests: Sequence[Request], *, endless: bool) -> None:
        """Refuses what does not fit alone, whatever the model will say.

        Args:
          requests: that have not run yet.
          endless: whether nothing ends an answer before its length does.

        Raises:
          CapacityError: names the first of the largest.
        """
        for what, slots in (
            ("the prompt", self._prompt_slots),
            ("the first chunk", self._first_slots),
            ("the sequence to its end", self._all_slots if endless else self._prompt_slots),
        ):
            request = max(requests, key=slots, default=None)
            if request is None:
                return
            alone = np.zeros(self.runner.lengths.shape, np.int64)
            alone[:, 0] = slots(request)
            if not self.runner.fits(alone, prompt=True):
                raise self.too_small(request, what)

    def place_all(
        self,
        waiting: collections.deque[Request],
        taken: Container[int],
        extra: np.ndarray,
    ) -> collections.deque[int]:
        """Lanes for the first requests that wait, if all those that find one fit together.

        As `place` would choose one by one, but the pool is asked once. `extra` is as there.
        """
        lanes = self.runner.free_lanes(taken)[: len(waiting)]
        together = extra.copy()
        for lane, request in zip(lanes, waiting, strict=False):
            together[:, lane] = self._needed(request)
        if not self.runner.fits(together, prompt=True):
            return collections.deque()
        extra[:] = together
        return collections.deque(lanes)

    def place(self, request: Request, taken: Container[int], extra: np.ndarray) -> int | None:
        """A free lane where the next chunks of a request fit; `extra` then holds what they need."""
        needed = self._needed(request)
        for lane in self.runner.open_lanes(taken):
            extra[:, lane] = needed
            if self.runner.fits(extra, prompt=True):
                return lane
            extra[:, lane] = 0
        return None

    def too_small(self, request: Request, what: str) -> CapacityError:
        """The error of a request that does not fit even alone."""
        runner = self.runner
        pages = runner.allocator.pages_per_shard
        tokens = request.seen + len(request.before) + len(request.prompt) + len(request.generated)
        return CapacityError(
            f"The cache cannot hold {what} of prompt {request.index} ({tokens} tokens so far) "
            f"even alone: it has {pages} pages of {runner.page_size} tokens"
            f"{' on each device' if runner.num_shards > 1 else ''} for {runner.lengths[:, 0].size} "
            "rows (layers x KV heads). Give it more memory (memory=), a smaller chunk or "
            "page_size, a shorter prompt, fewer max_new_tokens, or a policy that keeps less."
        )

    def _needed(self, request: Request) -> np.ndarray:
        """Slots [L, K] that the first chunks of a request can take."""
        needed = np.full_like(self.runner.lengths[:, 0], self._first_slots(request))
        if request.slots is None:
            return needed
        return np.maximum(needed, request.slots + min(self.chunk, request.remaining))

    def _first_slots(self, request: Request) -> int:
        first = min(len(request.before) + len(request.prompt), self.prefill_chunk)
        return first + min(self.chunk, request.remaining)

    def _prompt_slots(self, request: Request) -> int:
        """Slots that a row is sure to need by the end of the prompt, as far as is known."""
        tokens = len(request.before) + len(request.prompt)
        return tokens if self.runner.policy.shrinks else self._at_least(tokens)

    def _all_slots(self, request: Request) -> int:
        """The same by the end of the longest answer; its newest token never enters the cache."""
        tokens = len(request.before) + len(request.prompt) + request.max_new_tokens - 1
        return self._at_least(tokens)

    def _at_least(self, tokens: int) -> int:
        """Slots that a row is sure to hold after so many tokens."""
        return self.runner.policy.footprint(tokens, page_size=self.runner.page_size).at_least
