"""Admission of requests: a free lane with pages for the next chunks, or an error that explains.

Some requests are known before they run not to fit: every row holds the first chunk of a prompt, a
prompt with full attention is in the pool in full, and a policy without eviction holds the answer
too.
"""

import collections
import dataclasses
from collections.abc import Container, Mapping, Sequence, Set

import numpy as np

from dms_jax.errors import CapacityError
from dms_jax.generation import sharing
from dms_jax.generation.reading import Part, Reading
from dms_jax.generation.requests import Request
from dms_jax.generation.runner import Runner
from dms_jax.generation.shapes import tokens_in_one_pass

# Slots [L, K], or as many in every row: most requests have nothing to add row by row.
Slots = int | np.integer | np.ndarray


@dataclasses.dataclass(frozen=True)
class Room:
    """Assigns requests to lanes of a runner's cache.

    Attributes:
      runner: the runner that owns the lanes and pages.
      chunk: number of decode steps between two looks at the requests.
      prefill_chunk: number of prompt tokens per sequence and compiled program.
    """

    runner: Runner
    chunk: int
    prefill_chunk: int

    def check(self, requests: Sequence[Request], *, endless: bool) -> None:
        """Refuses requests that cannot fit even alone, whatever the model generates.

        Args:
          requests: requests that have not run yet.
          endless: whether answers end only at their maximum length.

        Raises:
          CapacityError: if a request cannot fit; names the first of the largest.
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
            lane = next(lane for lane in range(alone.shape[1]) if lane != request.base)
            alone[:, lane] = slots(request) + self._continued(request)
            if not self.runner.fits(alone, prompt=True):
                raise self.too_small(request, what)

    def least_slots(self, request: Request, *, endless: bool) -> int:
        """Returns the slots without which no row of a request, alone, comes to its end."""
        last = self._all_slots(request) if endless and not request.sampling.stop_strings else 0
        return max(self._prompt_slots(request), self._first_slots(request), last)

    def slots_alone(self, most: int) -> int:
        """Returns the most slots, up to `most`, that every row of a sequence can hold alone.

        The pool is empty.
        """
        least = 0
        while least < most:
            middle = (least + most + 1) // 2
            alone = np.zeros(self.runner.lengths.shape, np.int64)
            alone[:, 0] = middle
            fits = self.runner.fits(alone, prompt=True)
            least, most = (middle, most) if fits else (least, middle - 1)
        return least

    def admit(
        self,
        waiting: collections.deque[Request],
        running: dict[int, Request],
        reading: Reading,
        bases: Set[int],
    ) -> tuple[dict[int, Request], dict[int, int]]:
        """Moves waiting requests into free lanes, as far as they fit, to read their prompts there.

        Args:
          waiting: requests in the order in which they are let in.
          running: lane -> its request.
          reading: the lanes that do not decode yet.
          bases: lanes whose sequences requests continue in copies.

        Returns:
          Lane -> the request that was let in; lane -> the lane whose sequence its prompt continues.

        Raises:
          CapacityError: the first one does not fit, and nothing runs.
        """
        extra = self.extra(running, reading.parts)
        started: dict[int, Request] = {}
        continued: dict[int, int] = {}
        taken = running.keys() | bases
        placed = self.place_all(waiting, taken, extra)
        while waiting:
            request = waiting[0]
            lane = placed.popleft() if placed else self.place(request, taken, extra)
            if lane is None:
                if not running:
                    raise self.too_small(request, "the first chunk")
                break
            running[lane] = started[lane] = waiting.popleft()
            taken.add(lane)
            # A preempted request recomputes its answer as an answer, if the policy distinguishes
            # it from a prompt. Its last token has never been in the cache.
            prompt, past = request.before + request.prompt, request.generated[:-1]
            if self.runner.policy.parallel != "prompts":
                prompt, past = prompt + past, []
            shared = sharing.prompt_of(self.runner, request, lane)
            whole = tokens_in_one_pass(
                self.runner.policy,
                seen=request.seen,
                prompt=len(prompt),
                max_length=request.max_length,
            )
            reads = reading.add(lane, Part(request, prompt, past, whole, shared))
            if reads and request.base is not None:
                continued[lane] = request.base
        return started, continued

    def put_back(self, running: dict[int, Request], waiting: collections.deque[Request]) -> int:
        """Moves the youngest running request back into the queue; returns the lane that it left.

        Raises:
          CapacityError: it is the only one.
        """
        youngest = next(reversed(running))
        if len(running) == 1:
            raise self.too_small(running[youngest], "the sequence to its end")
        request = running.pop(youngest)
        request.slots = self.runner.lengths[:, youngest].copy()
        waiting.appendleft(request)
        self.runner.clear([youngest])
        return youngest

    def place_all(
        self,
        waiting: collections.deque[Request],
        taken: Container[int],
        extra: np.ndarray,
    ) -> collections.deque[int]:
        """Returns lanes for the first waiting requests, if they all fit together, else none.

        The choice is that of `place` for one after the other, with one query of the pool. `extra`
        is updated as there.
        """
        lanes = self._free_lanes(taken)[: len(waiting)]
        together = extra.copy()
        for lane, request in zip(lanes, waiting, strict=False):
            together[:, lane] = self._needed(request)
        if not self.runner.fits(together, prompt=True):
            return collections.deque()
        extra[:] = together
        return collections.deque(lanes)

    def place(self, request: Request, taken: Container[int], extra: np.ndarray) -> int | None:
        """Returns a free lane in which the next chunks of a request fit; sets `extra` to them."""
        needed = self._needed(request)
        shard_of = self.runner.allocator.shard_of
        for lane in self._open_lanes(taken):
            if request.base is not None and shard_of(lane) != shard_of(request.base):
                continue
            extra[:, lane] = needed
            if self.runner.fits(extra, prompt=True):
                return lane
            extra[:, lane] = 0
        return None

    def extra(self, running: Mapping[int, Request], parts: Mapping[int, Part]) -> np.ndarray:
        """Returns the slots [L, B, K] that lanes need besides those that they hold.

        Args:
          running: lane -> its request.
          parts: lane -> what it reads, if it does not decode yet.
        """
        extra = np.zeros(self.runner.allocator.reserved.shape, np.int64)
        following = [min(self.chunk, request.remaining) for request in running.values()]
        extra[:, list(running)] = np.array(following, np.int64)[:, None]
        for lane, part in parts.items():
            extra[:, lane] = self.rest(part.request, part.done, part.left)
        return extra

    def rest(self, request: Request, done: int, left: int) -> Slots:
        """Returns the slots of each row that a request needs which has read some tokens.

        They are what its prompt takes in any case, and no less than its next program reserves.

        Args:
          request: the request.
          done: tokens that it has read.
          left: tokens that it has to read before its prompt, or its answer, ends.
        """
        rest = self._needed(request) - self._continued(request) - done
        following = min(self.chunk, request.remaining), min(self.prefill_chunk, left)
        return np.maximum(rest, max(following))

    def fork(
        self, source_of: dict[int, int], running: Mapping[int, Request], extra: np.ndarray
    ) -> list[int]:
        """Copies prompts to lanes, as far as they fit; returns the lanes without one, last first.

        Their requests know the slots that they need (`Request.slots`).

        Args:
          source_of: lane -> the lane that read its prompt.
          running: lane -> its request.
          extra: slots [L, B, K] that lanes need besides those that they hold; it is updated.
        """
        runner, without = self.runner, []
        for lane, source in source_of.items():
            extra[:, lane] += runner.lengths[:, source]
        while source_of and not runner.fits(extra):
            lane, source = source_of.popitem()
            running[lane].slots = runner.lengths[:, source].copy()
            extra[:, lane] = 0
            without.append(lane)
        if source_of:
            sharing.fork(runner, source_of)
        return without

    def too_small(self, request: Request, what: str) -> CapacityError:
        """Returns the error for a request that does not fit even alone."""
        runner = self.runner
        pages = runner.allocator.pages_per_shard
        tokens = request.seen + len(request.before) + len(request.prompt) + len(request.generated)
        # A pool has no more pages than its lanes need for sequences of the length it is made for.
        beyond = request.max_length > runner.max_tokens
        more = f"a larger max_tokens (it is {runner.max_tokens}), more" if beyond else "more"
        return CapacityError(
            f"The cache cannot hold {what} of prompt {request.index} ({tokens} tokens so far) "
            f"even alone: it has {pages} pages of {runner.page_size} tokens"
            f"{' on each device' if runner.num_shards > 1 else ''} for {runner.lengths[:, 0].size} "
            f"rows (layers x KV heads). Give it {more} memory (memory=), a smaller chunk or "
            "page_size, a shorter prompt, fewer max_new_tokens, or a policy that keeps less."
        )

    def _free_lanes(self, taken: Container[int]) -> list[int]:
        """Returns every free lane if one device holds them all, else none."""
        if self.runner.data_shards > 1:
            return []
        return [lane for lane in range(len(self.runner.seen)) if lane not in taken]

    def _open_lanes(self, taken: Container[int]) -> list[int]:
        """Returns one free lane of each device that has one, the emptiest device first."""
        num_lanes = len(self.runner.seen)
        per_shard = num_lanes // self.runner.data_shards
        lanes = []
        for start in range(0, num_lanes, per_shard):
            free = [lane for lane in range(start, start + per_shard) if lane not in taken]
            if free:
                lanes.append((-len(free), free[0]))
        return [lane for _, lane in sorted(lanes)]

    def _needed(self, request: Request) -> Slots:
        """Returns the slots of each row without which a request is not let in.

        They are those of its first chunks and, because it would be preempted before its first token
        otherwise, those that its prompt takes in any case, with a chunk of steps unless the prompt
        is cut before.
        """
        prompt = self._prompt_slots(request)
        if not self.runner.policy.shrinks:
            prompt += min(self.chunk, request.remaining)
        needed = self._continued(request) + max(self._first_slots(request), prompt)
        if request.slots is None:
            return needed
        resumed = request.slots + min(self.chunk, request.remaining)
        return np.maximum(needed, self.runner.cut(resumed, request.slots))

    def _continued(self, request: Request) -> Slots:
        """Returns the slots of each row of the sequence that a request continues in a copy."""
        if request.base is None:
            return 0
        return self.runner.lengths[:, request.base]

    def _first_slots(self, request: Request) -> int:
        first = min(len(request.before) + len(request.prompt), self.prefill_chunk)
        return first + min(self.chunk, request.remaining)

    def _prompt_slots(self, request: Request) -> int:
        """Returns a lower bound on the slots that a row needs by the end of the prompt."""
        tokens = len(request.before) + len(request.prompt)
        return tokens if self.runner.policy.shrinks else self._at_least(tokens)

    def _all_slots(self, request: Request) -> int:
        """Returns the same by the end of the longest answer, whose last token is not cached."""
        tokens = len(request.before) + len(request.prompt) + request.max_new_tokens - 1
        return self._at_least(tokens)

    def _at_least(self, tokens: int) -> int:
        """Returns a lower bound on the slots that a row holds after `tokens` tokens."""
        return self.runner.policy.footprint(tokens, page_size=self.runner.page_size).at_least
