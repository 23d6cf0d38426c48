"""The scheduler: which requests have a lane and pages, and the state of each.

A request waits, is admitted to a lane when the pool can hold the minimum of its prompt, is
prefilled in chunks, and decodes in chunks until it ends (`requests.State`):

    WAITING --admit--> PREFILL --its prompt is complete--> DECODE --finish--> DONE
       ^                  |                                   |
       +--preempt, or no room for a copy of a shared prompt---+       cancel: from any to DONE

The queue is ordered by priority (`Request.priority`), then by arrival. A request that does not fit
blocks those behind it, so that a large one does not wait forever.

The pages that a program may need are reserved before it runs. If they do not fit, the youngest
running request of the lowest priority is preempted: it returns to the front of its priority with
its tokens and is recomputed later. Its answer is recomputed as an answer where the policy treats
that differently from a prompt, so that it decides as before.

Some requests are known not to fit before they run (`Admission.check`): every row holds the first
chunk of a prompt, a prompt with full attention is in the pool in full, and a policy without
eviction holds the answer too.
"""

import bisect
import collections
import dataclasses
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import numpy as np

from dms_jax.errors import CapacityError
from dms_jax.generation.notifier import Notifier
from dms_jax.generation.prefill import Prefill, PrefillQueue, prompt_key, tokens_in_one_pass
from dms_jax.generation.requests import FinishReason, Request, State
from dms_jax.generation.runner import Runner

# Requests to consider per free lane: some wait for prefixes that others prefill.
LOOKED_AT = 4

# Slots [L, K], or one number for all rows.
Slots = int | np.integer | np.ndarray


@dataclasses.dataclass(frozen=True)
class Admission:
    """Finds lanes and pages for requests, or the error that explains their lack.

    Attributes:
      runner: the runner that owns the lanes and pages.
      chunk: number of decode steps of a turn of the loop.
      prefill_chunk: number of prompt tokens per sequence and compiled program.
      end_tokens: token ids that end an answer.
    """

    runner: Runner
    chunk: int
    prefill_chunk: int
    end_tokens: tuple[int, ...]
    _least: dict[int, int] = dataclasses.field(default_factory=dict)  # by number of tokens

    def check(self, requests: Sequence[Request]) -> None:
        """Refuses requests that cannot fit even alone, whatever the model generates.

        Raises:
          CapacityError: a request cannot fit; the message names the first of the largest.
        """
        for what, slots in (
            ("the prompt", self._prompt_slots),
            ("the first chunk", self._first_slots),
            ("the sequence to its end", self._last_slots),
        ):
            request = max(requests, key=slots, default=None)
            if request is None:
                return
            alone = np.zeros(self.runner.reservation.lengths.shape, np.int64)
            alone[:, 0] = slots(request)
            if not self.runner.reservation.fits(alone, prompt=True):
                raise self.too_small(request, what)

    def least_slots(self, request: Request) -> int:
        """Returns a lower bound on the slots of each row that a request needs to reach its end."""
        slots = self._prompt_slots, self._first_slots, self._last_slots
        return max(each(request) for each in slots)

    def slots_alone(self, most: int) -> int:
        """Returns the slots that an empty pool has for each row, at most `most`."""
        least = 0
        while least < most:
            middle = (least + most + 1) // 2
            alone = np.zeros(self.runner.reservation.lengths.shape, np.int64)
            alone[:, 0] = middle
            fits = self.runner.reservation.fits(alone, prompt=True)
            least, most = (middle, most) if fits else (least, middle - 1)
        return least

    def place_all(
        self,
        waiting: collections.deque[Request],
        taken: Container[int],
        extra: np.ndarray,
    ) -> collections.deque[int]:
        """Returns lanes for the first waiting requests if they all fit together, else none.

        Equals `place` for each in turn, including the updates of `extra`, with a single query of
        the pool.
        """
        lanes = self._free_lanes(taken)[: len(waiting)]
        together = extra.copy()
        for lane, request in zip(lanes, waiting, strict=False):
            together[:, lane] = self._unshared_slots(request)
        if not self.runner.reservation.fits(together, prompt=True):
            return collections.deque()
        extra[:] = together
        return collections.deque(lanes)

    def place(self, request: Request, taken: Container[int], extra: np.ndarray) -> int | None:
        """Returns a free lane in which the next chunks of a request fit; sets `extra` to them."""
        needed = self._unshared_slots(request)
        for lane in self._open_lanes(taken):
            extra[:, lane] = needed
            if self.runner.reservation.fits(extra, prompt=True):
                return lane
            extra[:, lane] = 0
        return None

    def extra(self, running: Mapping[int, Request], prefills: Mapping[int, Prefill]) -> np.ndarray:
        """Returns the slots [L, B, K] that lanes need besides those that they hold.

        Args:
          running: lane -> its request.
          prefills: lane -> its `Prefill`, if it does not decode yet.
        """
        extra = np.zeros(self.runner.reservation.allocator.reserved.shape, np.int64)
        following = [min(self.chunk, request.remaining) for request in running.values()]
        extra[:, list(running)] = np.array(following, np.int64)[:, None]
        for lane, each in prefills.items():
            extra[:, lane] = self.rest(each.request, each.done, each.left)
        return extra

    def rest(self, request: Request, done: int, left: int) -> Slots:
        """Returns the slots of each row that a request needs in the middle of its prefill.

        That is the minimum of its prompt, and no less than its next program reserves.

        Args:
          request: the request.
          done: tokens that were launched.
          left: tokens to launch until its prompt, or its answer, ends.
        """
        rest = self._needed(request) - done
        following = min(self.chunk, request.remaining), min(self.prefill_chunk, left)
        return np.maximum(rest, max(following))

    def too_small(self, request: Request, what: str) -> CapacityError:
        """Returns the error for a request that does not fit even alone."""
        runner = self.runner
        pages = runner.reservation.allocator.pages_per_shard
        rows = runner.model.config.num_layers * runner.model.config.num_kv_heads
        tokens = len(request.prompt) + len(request.generated)
        # A pool has no more pages than its lanes need for sequences of the length it is made for.
        beyond = request.max_length > runner.max_tokens
        more = f"a larger `max_tokens` (it is {runner.max_tokens}), more" if beyond else "more"
        return CapacityError(
            f"The cache cannot hold {what} of prompt {request.index} ({tokens} tokens so far) "
            f"even alone: it has {pages} pages of {runner.page_size} tokens"
            f"{' on each device' if runner.num_shards > 1 else ''} for {rows} "
            f"rows (layers x KV heads). Give it {more} memory (`memory`), a smaller `chunk` "
            "or `page_size`, a shorter prompt, fewer `max_new_tokens`, or a policy that keeps less."
        )

    def _free_lanes(self, taken: Container[int]) -> list[int]:
        """Returns every free lane if one device holds them all, else none."""
        if self.runner.data_shards > 1:
            return []
        return [lane for lane in range(self.runner.num_lanes) if lane not in taken]

    def _open_lanes(self, taken: Container[int]) -> list[int]:
        """Returns one free lane of each device that has one, the emptiest device first."""
        num_lanes = self.runner.num_lanes
        per_shard = num_lanes // self.runner.data_shards
        lanes = []
        for start in range(0, num_lanes, per_shard):
            free = [lane for lane in range(start, start + per_shard) if lane not in taken]
            if free:
                lanes.append((-len(free), free[0]))
        return [lane for _, lane in sorted(lanes)]

    def _unshared_slots(self, request: Request) -> Slots:
        """Returns the slots that a request needs beyond the pages that it shares with others."""
        return self._needed(request) - self.runner.prefixes.shared_slots(request)

    def _needed(self, request: Request) -> Slots:
        """Returns the slots of each row that must be free to admit a request.

        They are the slots of its first chunks and the minimum of its prompt (with less it would be
        preempted before its first token), plus a chunk of steps unless the prompt is cut first.
        """
        prompt = self._prompt_slots(request)
        if not self.runner.reservation.shrinks:
            prompt += min(self.chunk, request.remaining)
        needed = max(self._first_slots(request), prompt)
        if request.slots is None:
            return needed
        resumed = request.slots + min(self.chunk, request.remaining)
        return np.maximum(needed, self.runner.reservation.limited(resumed, request.slots))

    def _first_slots(self, request: Request) -> int:
        first = min(len(request.prompt), self.prefill_chunk)
        return first + min(self.chunk, request.remaining)

    def _prompt_slots(self, request: Request) -> int:
        """Returns a lower bound on the slots that a row needs by the end of the prompt."""
        tokens = len(request.prompt)
        return tokens if self.runner.reservation.shrinks else self._at_least(tokens)

    def _last_slots(self, request: Request) -> int:
        """Returns a lower bound on a row's slots when its answer ends at full length.

        Its last token is not cached.
        """
        tokens = len(request.prompt) + request.max_new_tokens - 1
        by_token = bool(self.end_tokens) and not request.sampling.ignore_eos
        if request.given is None and (by_token or request.sampling.stop_strings):
            return self._prompt_slots(request)
        return self._at_least(tokens)

    def _at_least(self, tokens: int) -> int:
        """Returns a lower bound on the slots that a row holds after `tokens` tokens."""
        if tokens not in self._least:
            found = self.runner.policy.footprint(tokens, page_size=self.runner.page_size)
            self._least[tokens] = found.at_least
        return self._least[tokens]


class Scheduler:
    """The requests of one call of an engine, and the lanes that they have.

    Args:
      admission: finds lanes and pages.
      prefill: the queue of lanes in prefill.
      notifier: sends updates of requests.
      requests: the requests that wait at the start.

    Attributes:
      waiting: requests without a lane, in order of admission.
      running: lane -> its request, oldest first.
      cancelled: indices of requests to end early; callbacks may add some.
      held_back: whether lanes were left free for requests whose prefixes are in prefill.
    """

    def __init__(
        self,
        admission: Admission,
        prefill: PrefillQueue,
        notifier: Notifier,
        requests: Sequence[Request],
    ):
        self.admission, self.prefill, self.notifier = admission, prefill, notifier
        self.runner = admission.runner
        self.waiting = collections.deque(sorted(requests, key=_priority))
        self.running: dict[int, Request] = {}
        self.cancelled: set[int] = set()
        self.held_back = False
        self._uncopied: dict[int, np.ndarray] = {}  # lane -> slots of a prompt; see `fork`
        self._left: dict[int, Request] = {}  # index -> a waiting request that has left a lane
        for request in requests:
            self._note(request)

    @property
    def idle(self) -> bool:
        """Whether no request waits or has a lane."""
        return not (self.waiting or self.running)

    @property
    def decoding(self) -> dict[int, Request]:
        """The requests whose prompts are in the cache, by lane."""
        return {lane: each for lane, each in self.running.items() if each.state is State.DECODE}

    def accept(self, requests: Sequence[Request]) -> None:
        """Queues requests that came while others run."""
        for request in requests:
            self.runner.reservation.allow_length(request.max_length)
            self._note(request)
            bisect.insort_right(self.waiting, request, key=_priority)

    def _note(self, request: Request) -> None:
        """Marks a request as waiting, perhaps again after an error while it had a lane."""
        request.state = State.WAITING
        if request.slots is not None:
            self._left[request.index] = request
        self.runner.prefixes.note(request)

    # -- admission --------------------------------------------------------------------------------

    def admit(self) -> None:
        """Moves waiting requests into free lanes, as far as they fit, to be prefilled there.

        Raises:
          CapacityError: the first one does not fit, and nothing runs.
        """
        self.held_back = False
        taken = set(self.running)
        free = self.runner.num_lanes - len(taken)
        if not (self.waiting and free):
            return
        chosen, others = self._choose(free)
        extra = self.admission.extra(self.running, self.prefill.items)
        placed = self.admission.place_all(chosen, taken, extra)
        started: dict[int, Request] = {}
        for request in chosen:
            lane = placed.popleft() if placed else self.admission.place(request, taken, extra)
            if lane is None:
                break
            self.running[lane] = started[lane] = request
            request.state = State.PREFILL
            taken.add(lane)
            extra[:, lane] = self._begin(lane, request)
        left = [each for each in others if each.state is State.WAITING]
        self.waiting.extendleft(reversed(left))
        if not started:
            if not self.running:
                raise self.admission.too_small(chosen[0], "the first chunk")
            return
        self.held_back = len(others) > len(chosen) and len(taken) < self.runner.num_lanes
        self._start(started)

    def _choose(self, free: int) -> tuple[collections.deque[Request], list[Request]]:
        """Takes requests from the front of the queue and chooses those to admit.

        The others wait for prefixes that earlier ones prefill. At most `LOOKED_AT` requests are
        taken for each free lane.

        Args:
          free: number of free lanes.

        Returns:
          The requests to admit, and all that were taken, in order.
        """
        prefixes, readers = self.runner.prefixes, list(self.prefill.items.values())
        read_now, chosen, taken = set(), collections.deque[Request](), []
        while self.waiting and len(chosen) < free and len(taken) < LOOKED_AT * free:
            taken.append(request := self.waiting.popleft())
            if readers:  # nobody waits for the prefill of less urgent requests
                urgent = [each for each in readers if each.request.priority <= request.priority]
                if urgent:
                    read_now |= prefixes.read_now(urgent)
                    readers = [each for each in readers if each not in urgent]
            if not prefixes.waits(request, read_now):
                chosen.append(request)
                read_now |= prefixes.will_read(request)
        return chosen, taken

    def _begin(self, lane: int, request: Request) -> Slots:
        """Starts the prefill of a request after its longest cached prefix.

        Returns the slots of each row that it needs beyond the prefix.
        """
        item, prefixes = self._prefill_of(request, lane), self.runner.prefixes
        prefixes.begin(lane, request)
        if self.prefill.add(lane, item):
            item.done = prefixes.restore(lane, request)
            if not request.generated:
                request.meter.cached = item.done
        return self.admission.rest(request, item.done, item.left)

    def _start(self, started: Mapping[int, Request]) -> None:
        """Assigns lanes to newly admitted requests."""
        for lane, request in started.items():
            if (item := self.prefill.items[lane]).source == lane:
                item.stops = self.runner.prefixes.stops(request, item.done, lane=lane)
        self.runner.assign(started)

    def _prefill_of(self, request: Request, lane: int) -> Prefill:
        """Returns the `Prefill` of a request; a preempted one recomputes its answer so far.

        It is recomputed as an answer if the policy distinguishes answers from prompts. The last
        token of an answer is never in the cache.
        """
        policy, prompt, answer = self.runner.policy, request.prompt, []
        key = None  # no prompt, or an answer after it: not shared
        shares = self.runner.prefixes.shares_equal(request)
        if prompt and len(request.generated) <= 1 and not shares:
            shard = self.runner.reservation.allocator.shard_of(lane)
            key = prompt_key(policy, shard, request, prompt)
        if policy.parallel == "prompts":
            answer = request.generated[:-1]
        else:
            prompt = prompt + request.generated[:-1]
        whole = tokens_in_one_pass(policy, prompt=len(prompt), max_length=request.max_length)
        return Prefill(request, prompt, answer, whole, key, splits=not self.runner.appends)

    def take_prefixes(self, lanes: Iterable[int], collect: Callable[[], None]) -> None:
        """Caches the prefixes that a prefill program has completed.

        Args:
          lanes: lanes of the program.
          collect: waits for prompts, so that the lengths of rows are known.
        """
        passed = {lane: self.prefill.items[lane].pass_stops() for lane in lanes}
        if any(passed.values()) and not self.runner.appends:
            collect()
        given = {lane: (self.running[lane], stops) for lane, stops in passed.items()}
        self.runner.prefixes.take(given)

    def fork(self, source_of: dict[int, int]) -> None:
        """Copies shared prompts to lanes while pages last; requests without a copy wait again.

        Requests that end with their first token need no copy.

        Args:
          source_of: lane -> the lane that prefilled its prompt.
        """
        lengths = self.runner.reservation.lengths  # waits for the prompts
        for lane in [lane for lane in source_of if self.running[lane].max_new_tokens == 1]:
            self._uncopied[lane] = lengths[:, source_of.pop(lane)].copy()
        if not source_of:
            return
        extra = self.admission.extra(self.running, self.prefill.items)
        for lane, source in source_of.items():
            extra[:, lane] += lengths[:, source]
        while source_of and not self.runner.reservation.fits(extra):
            lane, source = source_of.popitem()
            request = self.running.pop(lane)
            request.slots = lengths[:, source].copy()
            extra[:, lane] = 0
            self._put_back(request)
        if source_of:
            self.runner.fork(source_of)

    def preempt(self) -> int:
        """Moves the youngest request of the lowest priority back into the queue.

        Returns:
          The lane that it left.

        Raises:
          CapacityError: it is the only one.
        """
        lane = max(reversed(self.running), key=lambda lane: self.running[lane].priority)
        if len(self.running) == 1:
            raise self.admission.too_small(self.running[lane], "the sequence to its end")
        request = self.running.pop(lane)
        if request.state is State.DECODE:
            self.runner.prefixes.keep({lane: request})
        request.slots = self.runner.reservation.lengths[:, lane].copy()
        self._put_back(request)
        self.held_back = False  # answers must go on: it needs pages that they hold
        self.prefill.drop_departed(self.running)
        self.runner.clear([lane])
        return lane

    def _put_back(self, request: Request) -> None:
        """Puts a request that left its lane at the front of its priority."""
        bisect.insort_left(self.waiting, request, key=_priority)
        self._note(request)

    # -- ends -------------------------------------------------------------------------------------

    def fail(self, request: Request, reason: str) -> None:
        """Ends a request whose grammar cannot be followed any further, like a cancelled one."""
        request.failure = (
            f"The grammar of an answer cannot be followed to its end: {reason}. Give a simpler one."
        )
        self.cancelled.add(request.index)

    def finish(self, *, cancel: bool = True) -> None:
        """Ends finished and cancelled requests, frees their lanes and pages, queues their updates.

        Without `cancel` nothing is cancelled: prompts or first tokens may be in flight.
        """
        self.runner.reservation.trim()
        cancelled = self._cancelled_now() if cancel else set()
        self.cancelled -= cancelled
        ended: dict[int, Request] = {}
        for lane, request in self.running.items():
            if request.index in cancelled and request.remaining:
                # Unless its last tokens ended it themselves.
                request.finish_reason = _reason(request)
            elif request.state is State.PREFILL or not request.has_new_tokens:
                continue
            self.notifier.settle(request)
            if request.finish_reason is not None:
                request.state = State.DONE
                ended[lane] = request
                slots = self._uncopied.pop(lane, None)
                if slots is None:
                    slots = self.runner.reservation.lengths_of(lane)
                usage = dict(cached=int(self.runner.seen[lane]), live=int(slots.sum()))
                usage |= self.runner.reservation.bytes_of(slots)
                self.notifier.add_end(request, usage)
        for lane in ended:
            del self.running[lane]
        self.prefill.drop_departed(self.running)
        if ended:
            self.runner.prefixes.keep(ended)
            self.runner.clear(list(ended))
        self._finish_waiting(cancelled)

    def finish_and_notify(self, *, cancel: bool = True) -> None:
        """Ends requests and sends their updates, until these cancel no more.

        Requests cancelled while another chunk is in flight end after it. `cancel`: see `finish`.
        """
        self.finish(cancel=cancel)
        if self.notifier.on_tokens is None:
            return
        self.notifier.notify()
        while cancel and self._cancelled_now():
            self.finish()
            self.notifier.notify()

    @property
    def to_cancel(self) -> set[int]:
        """The indices of requests to end now; one whose prompt others share ends later."""
        return self.cancelled and self.cancelled - self.prefill.spared(self.cancelled)

    def _cancelled_now(self) -> set[int]:
        """Returns `to_cancel`, or nothing while steps are in flight."""
        return set() if self.runner.reservation.steps_in_flight.any() else self.to_cancel

    def _finish_waiting(self, cancelled: set[int]) -> None:
        """Ends queued requests that were cancelled or have unreported tokens; queues their updates.

        Only requests that left a lane have such tokens, so a queue of thousands is not scanned.
        Their usage counts the slots they held, or that their copy of a shared prompt would have
        held.
        """
        self._left = {
            index: each for index, each in self._left.items() if each.state is State.WAITING
        }
        changed = [each for each in self._left.values() if each.has_new_tokens]
        asked = [each for each in self.waiting if each.index in cancelled] if cancelled else []
        for request in asked:
            if request.remaining:
                request.finish_reason = _reason(request)  # unless that token ends it itself
            if not request.has_new_tokens:
                changed.append(request)
        for request in changed:
            self.notifier.settle(request)
            if request.finish_reason is not None:
                request.state = State.DONE
                held = dict(cache_bytes=0, host_bytes=0)  # never started
                if request.slots is not None:
                    held = self.runner.reservation.bytes_of(request.slots)
                self.notifier.add_end(request, dict(cached=0, live=0) | held)
        if any(each.state is State.DONE for each in changed):
            waiting = list(self.waiting)
            self.waiting.clear()
            for each in waiting:
                if each.state is State.DONE:
                    self.runner.prefixes.waits_no_more(each)
                else:
                    self.waiting.append(each)

    def record_peak_bytes(self) -> None:
        """Records the pages that are reserved now in the usage of running requests."""
        held = self.runner.reservation.cache_bytes()
        for lane, request in self.running.items():
            request.meter.peak_bytes = max(request.meter.peak_bytes, held[lane])


def _priority(request: Request) -> int:
    return request.priority


def _reason(request: Request) -> FinishReason:
    """Why a cancelled request ends."""
    return "cancelled" if request.failure is None else "grammar"
