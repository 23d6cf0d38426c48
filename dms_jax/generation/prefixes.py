"""Cached prefixes: saved cache states after the first tokens of earlier prompts and answers.

A request whose prompt begins like an earlier sequence continues from there:

    "system, document, question 1"      states   after the document
    "system, document, question 2"      ------>  prefills only its question

Which states are exact. A state may be continued if it depends only on its tokens
(`Policy.prefix_exact`): always if a policy decides from the tokens before a query, in both prompts
and answers (Vanilla, DMS, DMC, StreamingLLM, KVzap, TOVA and H2O token by token); within the prompt
for policies that treat answers differently (Quest, KCache); and before the end of the prompt for
policies that cut it there (SnapKV and similar policies, TOVA and H2O with dense prompts), or after
it if the budget was not reached. A cut sequence is never continued.

How states are stored. Sequences and states share the pages that no continuation writes to
(`Policy.frozen_slots`), and have their own copies of the others. DMS and other policies of delayed
eviction overwrite only the slots of the last tokens, in place:

    row of 16,384 tokens, 5,000 of them kept, window 16    pages 0 ... 76    shared
                                                           pages 77 and 78   copied

A policy that only appends (`Policy.appends`) never writes to a full page again: its states copy
nothing, and serve every prefix of whole pages. Policies that may overwrite any slot (TOVA, H2O)
copy all. When a request ends, its pages become a state without a copy.

Where states are taken (as Marconi does, arXiv 2411.19379):

    where known prompts diverge  a prefix that several share, at the last whole page before; or near
                                 the end of a prompt if copies of it wait
    near the end of a prompt     at its last whole page, as templates often change what follows; not
                                 if the prompt continues an answer
    at the end of an answer      the next turn of an agent begins with it

A closed list of an engine that keeps no prefixes takes only the first kind. A request waits for a
prefix that another one prefills.

Where states live. In pages of the pool that no row needs. These pages count as free, and rows that
need them take them from the least recently used prefixes. Such prefixes move to host memory, up to
a byte limit, and come back when they are used. They are dropped beyond that limit, and when they
leave the device faster than they may be copied (`TO_HOST`) or than copies arrive. A state that a
later one of the same session replaces is dropped first, and never copied to the host, unless
another request diverges from it: an agent holds one state, not one per turn. Where room is short,
its next turn takes the pages of that state instead of a copy.

A tree belongs to one engine and one of its adapters, which fix the model, dtype, policy and cache
format of its states; its tokens are those after the chat template. A policy whose decisions depend
on the longest length of a request has a tree for each length. New weights (`Engine.update`) start
new trees. Caches on a mesh keep no prefixes.
"""

import collections
import dataclasses
import itertools
import time
import weakref
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Bool, Int

from dms_jax.cache.host_pages import NO_PAGE, HostPages, block_sizes, to_device, to_host
from dms_jax.errors import ConfigError
from dms_jax.generation.prefix_tree import Node, PrefixTree

if TYPE_CHECKING:
    from dms_jax.generation.prefill import Prefill
    from dms_jax.generation.requests import Request
    from dms_jax.generation.runner import Runner


# Bytes copied to the host per second on average, and at once: about 60 blocks a second, as each
# launch takes time of the engine. Without a limit, a pool full of other prompts' prefixes copies
# each of them to the host, only to drop it there for the next one.
TO_HOST, TO_HOST_AT_ONCE = 1e9, 2.0**30
# Equal prompts of so many pages share them; each prefills the rest, up to a page, by itself.
_SHARED_PAGES = 8
_NONE = np.zeros(0, np.int32)  # no pages


def _firsts(counts: Int[np.ndarray, "L K"], held: Int[np.ndarray, "L K"]) -> Bool[np.ndarray, " n"]:
    """Returns which pages are the first `counts` of each row, of `held` pages a row, row by row.

    # counts: [[1, 2]]  held: [[3, 2]]  Out: [1, 0, 0, 1, 1]
    """
    columns = np.arange(held.max(initial=0))
    return (columns < counts[..., None])[columns < held[..., None]]


@dataclasses.dataclass(eq=False)
class PrefixState:
    """The state of the cache after some tokens.

    Attributes:
      node: its place in the tree, whose depth is the number of tokens.
      lengths: slots in use of each row.
      frozen: those that no continuation writes to.
      pages: the pages of the rows, row by row, in the device's pool or in the host's.
      rows: the policy's state of each row, leaves [L, K, ...].
      ended: whether an answer ends here.
      superseded: whether no later turn of its session is expected to continue it; if so, it is
        dropped first and not copied to the host.
    """

    node: Node
    lengths: Int[np.ndarray, "L K"]
    frozen: Int[np.ndarray, "L K"]
    pages: Int[np.ndarray, " n"]
    rows: Any
    ended: bool = False
    superseded: bool = False


@dataclasses.dataclass(frozen=True)
class PrefixCounts:
    """Number and bytes of the cached prefixes.

    Attributes:
      states, host_states: prefixes in the pool, and in host memory.
      bytes, host_bytes: bytes of their pages; a shared page counts once, also one that a running
        request uses.
    """

    states: int = 0
    host_states: int = 0
    bytes: int = 0
    host_bytes: int = 0


class Prefixes:
    """The cached prefixes of a runner.

    Args:
      runner: the runner whose pages they take.
      host_bytes: the most bytes in host memory; None to share prefixes only between the requests of
        a call.

    Attributes:
      keeps: whether prefixes are kept for later requests.
      closed: whether all requests of the running call are known.

    Raises:
      ConfigError: `host_bytes` is given on a mesh.
    """

    def __init__(self, runner: "Runner", host_bytes: float | int | None):
        # A weak reference: a cycle would keep a runner's memory alive after it.
        self._runner, self._policy = weakref.proxy(runner), runner.policy
        self._on_mesh = runner.model.mesh is not None
        self.keeps = host_bytes is not None
        if self.keeps and self._on_mesh:
            raise ConfigError(
                "prefix_cache: prefixes are kept on one device, not on a mesh. Leave it out, or "
                "load the model without a mesh."
            )
        self.closed = True
        self._host_bytes = int(host_bytes or 0)
        self._host: HostPages | None = None
        self._on_device = collections.OrderedDict[PrefixState, None]()  # first: used longest ago
        self._on_host: dict[PrefixState, None] = {}
        self.clock = time.monotonic
        self._may_copy, self._asked = TO_HOST_AT_ONCE, self.clock()
        self.reset()

    # -- places -----------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forgets all prefixes; their pages are gone with the runner's old allocator."""
        for state in (*self._on_device, *self._on_host):
            state.rows = None  # frees device memory now
            state.node.state = None
        self._trees: dict[tuple[str | None, int | None], PrefixTree] = {}
        self._on_device.clear()
        self._on_host.clear()
        # By lane: the number of tokens that its request continues, and whether an answer ends
        # there.
        self._continued: dict[int, tuple[int, bool]] = {}
        self._pinned: PrefixState | None = None
        if self._host is not None:
            self._host.clear()
        if not self._on_mesh:
            allocator = self._runner.reservation.allocator
            allocator.reclaim, allocator.on_free = self._reclaim, self._forget

    def clear(self) -> None:
        """Drops all prefixes, and frees their pages."""
        for state in self._on_device:
            self._allocator.drop(state.pages)
        self.reset()

    @property
    def adapters(self) -> set[str | None]:
        """The names of the adapters with prefixes; None is the plain model."""
        return {adapter for adapter, _ in self._trees}

    def drop(self, adapter: str | None) -> None:
        """Drops the prefixes of an adapter, and frees their pages."""
        for key in [key for key in self._trees if key[0] == adapter]:
            for state in [node.state for node in self._trees.pop(key).root.with_states()]:
                held: Any = self._allocator if state in self._on_device else self._host
                self._remove(state)
                held.drop(state.pages)

    @property
    def counts(self) -> PrefixCounts:
        """The cached prefixes and the bytes of their pages, on the device and on the host."""
        host = 0 if self._host is None else self._host.used
        page_bytes = self._runner.page_bytes
        return PrefixCounts(
            states=len(self._on_device),
            host_states=len(self._on_host),
            bytes=self._allocator.pages_of_prefixes * page_bytes,
            host_bytes=host * page_bytes,
        )

    @property
    def _allocator(self) -> Any:
        return self._runner.reservation.allocator

    def _tree(self, request: "Request") -> PrefixTree:
        """Returns the tree of all requests that can share states with this one."""
        policy = self._policy
        by_length = policy.parallel == "never" and policy.for_length(1) is not policy
        key = request.adapter, request.max_length if by_length else None
        return self._trees.setdefault(key, PrefixTree())

    def _round_to_pages(self, tokens: int) -> int:
        """Rounds a number of tokens down to whole pages."""
        return tokens - tokens % self._runner.page_size

    # -- what requests have in common -------------------------------------------------------------

    def serves(self, request: "Request") -> bool:
        """Whether a request can use prefixes."""
        return bool(request.prompt) and not self._on_mesh and (self.keeps or self.closed)

    def note(self, request: "Request") -> None:
        """Adds the prompt of a queued request to the tree."""
        if self.serves(request):
            node = self._tree(request).insert(request.prompt_array)
            node.ends, node.waiting = True, node.waiting + 1

    def begin(self, lane: int, request: "Request") -> None:
        """Notes that a request got a lane."""
        self._continued.pop(lane, None)
        self.waits_no_more(request)

    def waits_no_more(self, request: "Request") -> None:
        """Notes that a request left the queue."""
        if self.serves(request):
            self._tree(request).insert(request.prompt_array).waiting -= 1

    def read_now(self, prefills: Collection["Prefill"]) -> set[Node]:
        """Returns the prefixes that lanes will cache soon, and the prompts that they prefill."""
        served = (item for item in prefills if self.serves(item.request))
        return {node for item in served for node in self._nodes(item.request, item.stops)}

    def will_read(self, request: "Request") -> set[Node]:
        """Returns the same (see `read_now`) for a request that is admitted next."""
        if not self.serves(request):
            return set()
        found = self._find(request, *self._readable(request))
        return self._nodes(request, self.stops(request, found[1] if found else 0, 1))

    def _nodes(self, request: "Request", stops: Collection[int]) -> set[Node]:
        """Returns the nodes of some prefixes of a prompt, and of the whole prompt."""
        tree, tokens = self._tree(request), request.prompt_array
        return {tree.insert(tokens[:each]) for each in (*stops, len(tokens))}

    def shares_equal(self, request: "Request") -> bool:
        """Whether equal prompts that wait together share the pages of one, rather than copy it.

        Long ones do, unless the policy may overwrite any of their slots.
        """
        if len(request.prompt) < _SHARED_PAGES * self._runner.page_size:
            return False
        return self.serves(request) and (self._runner.appends or self._policy.parallel == "always")

    def waits(self, request: "Request", read_now: set[Node]) -> bool:
        """Whether a longer prefix of a request than any cached one is being prefilled.

        It does not wait for an equal prompt that is copied.
        """
        if not read_now or request.generated or not self.serves(request):
            return False
        tokens = request.prompt_array
        path, _, last = self._tree(request).walk(tokens)
        equal = last.depth == len(tokens) and last in read_now
        if equal and not self.shares_equal(request):
            return False
        read = (node.depth for node in path if node in read_now)
        coming = max((depth for depth in read if depth < len(tokens)), default=0)
        found = self._find(request, tokens, len(tokens) - 1)
        return coming >= (found[1] if found else 0) + self._runner.page_size

    def stops(
        self, request: "Request", start: int, admitted: int = 0, lane: int | None = None
    ) -> tuple[int, ...]:
        """Returns the lengths of the prefixes of a prompt that are to be cached.

        Args:
          request: the request.
          start: number of tokens that are cached already.
          admitted: number of equal queued prompts that are admitted together, this one included.
          lane: its lane, once it has one.
        """
        if not self.serves(request):
            return ()
        if self.shares_equal(request):  # one of them is admitted before the others
            admitted = min(admitted, 1)
        most = len(request.prompt) - 1
        path, _, _ = self._tree(request).walk(request.prompt_array)
        parts = {
            node.depth
            for node in path
            if len(node.children) + node.ends > 1 or node.waiting > admitted
        }
        if self.keeps:
            _, behind_answer = self._continued.get(-1 if lane is None else lane, (0, False))
            # The turn of a session continues its last answer, as the next one will: a stop in its
            # prompt would be another program (with 16 agents and DMS, half of the time to their
            # first tokens). An answer with stop strings may become no state; see `keep`.
            continues = behind_answer and max(parts, default=0) <= start
            if self._runner.appends or not continues or request.sampling.stop:
                parts.add(most)
        whole = {self._round_to_pages(min(each, most)) for each in parts}
        least = start + self._runner.page_size  # less is not worth a separate program
        return tuple(sorted(each for each in whole if each >= least))

    def cached(self, request: "Request") -> int:
        """Returns the number of tokens of a request's longest cached prefix."""
        found = self._find(request, *self._readable(request)) if self.serves(request) else None
        return 0 if found is None else found[1]

    def shared_slots(self, request: "Request") -> "Int[np.ndarray, 'L K'] | int":
        """Returns the slots of each row in pages that a request would share with running ones."""
        if not self.serves(request):
            return 0
        found = self._find(request, *self._readable(request))
        if found is None or found[0] not in self._on_device:
            return 0
        part, allocator = self._part(*found), self._allocator
        changing, _ = self._changing(part.lengths, part.frozen)
        shared = allocator.held_by_rows(part.pages) & ~changing
        rows = part.lengths.size
        row_of = np.repeat(np.arange(rows), allocator.pages_for(part.lengths).ravel())
        counts = np.bincount(row_of[shared], minlength=rows)
        return counts.reshape(part.lengths.shape) * self._runner.page_size

    # -- lookup -----------------------------------------------------------------------------------

    def _readable(self, request: "Request") -> tuple[Int[np.ndarray, " n"], int]:
        """Returns the tokens that a request prefills, and the length of its longest usable prefix.

        A preempted request knows its next token. Others, or those that share their prompt, need the
        hidden state of the last prompt token; and policies that cut prompts must see their end.
        """
        if len(request.generated) > 1 and self._policy.parallel != "prompts":
            tokens = request.sequence[:-1]
            return tokens, len(tokens)
        return request.prompt_array, len(request.prompt) - 1

    def _find(
        self, request: "Request", tokens: Int[np.ndarray, " n"], most: int
    ) -> tuple[PrefixState, int] | None:
        """Returns the state of the longest prefix of at most `most` tokens, and its length."""
        path, known, last = self._tree(request).walk(tokens)
        stated = (node for node in path[::-1] if node.state is not None and node.depth <= most)
        found = next(((node.state, node.depth) for node in stated), None)
        if not self._runner.appends:
            return found
        # States below this node share more tokens with the prompt: use their first pages.
        for common, node in ((known, last), *((node.depth, node) for node in path[::-1])):
            whole = self._round_to_pages(min(common, most))
            if whole <= (found[1] if found else 0):
                break
            if (state := node.state_below(whole)) is not None:
                return state, whole
        return found

    def restore(self, lane: int, request: "Request") -> int:
        """Puts the longest cached prefix of a request into an empty lane; returns its tokens."""
        if not self.serves(request):
            return 0
        found = self._find(request, *self._readable(request))
        if found is None or not found[1]:
            return 0
        state, count = found
        if state in self._on_host and not self._load(state):
            part = self._part(state, count)
            if not self._write_to(lane, state, part):
                return 0
        else:
            self._touch(state)
            part = self._part(state, count)
            self._copy_to(lane, state, part)
        self._runner.load_lane(lane, part.lengths, part.frozen, count, state.rows)
        self._continued[lane] = count, state.ended
        request.meter.read_before(int(part.lengths.sum()))
        return count

    def _copy_to(self, lane: int, state: PrefixState, part: PrefixState) -> None:
        """Gives an empty lane the pages of a state, and copies of those that it will write to.

        A session needs its last answer no longer once its next turn runs: if room is short, the
        turn takes these pages, too, rather than other sessions lose their states to a copy.

        Args:
          lane: the lane.
          state: the state.
          part: what the lane gets of it (`_part`).
        """
        allocator, pages = self._allocator, part.pages
        counts = allocator.pages_for(part.lengths)
        changing, copied = self._changing(part.lengths, part.frozen)
        last_of_session = state.ended and not state.node.is_awaited
        spared = not last_of_session or self._has_spare(copied)
        if spared and allocator.can_take(copied, besides=state.pages):
            self._pinned = state
            allocator.give(lane, counts, np.where(changing, allocator.no_page, pages))
            self._pinned = None
            if changing.any():
                own = allocator.pages_of(lane, part.lengths)
                self._runner.copy_pages(pages[changing], own[changing])
            return
        self._move_to_host(state)
        allocator.give(lane, counts, pages)
        allocator.drop(pages)
        self._forget(pages[changing])

    def _changing(
        self, lengths: Int[np.ndarray, "L K"], frozen: Int[np.ndarray, "L K"]
    ) -> tuple[Bool[np.ndarray, " n"], Int[np.ndarray, "L K"]]:
        """Returns which pages of some rows a continuation writes to, and their number by row."""
        counts = self._allocator.pages_for(lengths)
        first = np.minimum(frozen // self._runner.page_size, counts)
        return ~_firsts(first, counts), counts - first

    def _has_spare(self, counts: Int[np.ndarray, "L K"]) -> bool:
        """Whether rows can get so many pages without those of states that are still needed."""
        if self._allocator.has_spare(counts):
            return True
        replaced = itertools.takewhile(lambda each: each.superseded, self._on_device)
        pages = np.concatenate([_NONE, *(each.pages for each in replaced)])
        return self._allocator.has_spare(counts, pages)

    def _write_to(self, lane: int, state: PrefixState, part: PrefixState) -> bool:
        """Copies a state from host memory to a lane; False if the pool has no room for it.

        Args:
          lane: the lane, which is empty.
          state: the state; the pool has no room for another copy of it.
          part: what the lane gets of it (`_part`).
        """
        allocator, counts = self._allocator, self._allocator.pages_for(part.lengths)
        if not allocator.can_take(counts, besides=_NONE):
            return False
        del self._on_host[state]  # so that making room does not drop it
        allocator.give(lane, counts, np.full(counts.sum(), allocator.no_page, np.int32))
        self._on_host[state] = None
        self._write(part.pages, allocator.pages_of(lane, part.lengths))
        return True

    def _write(self, slots: Int[np.ndarray, " n"], pages: Int[np.ndarray, " n"]) -> None:
        """Copies pages of host memory to pages of the pool."""
        assert self._host is not None
        for targets, block in self._host.read(slots, pages):
            self._runner.write_pages(targets, block)

    def _part(self, state: PrefixState, count: int) -> PrefixState:
        """Returns the state of the first `count` tokens: all of them unless the policy appends."""
        if not self._runner.appends:
            return state
        lengths = np.full_like(state.lengths, count)
        counts, held = (self._allocator.pages_for(each) for each in (lengths, state.lengths))
        pages = state.pages[_firsts(counts, held)]
        return dataclasses.replace(state, lengths=lengths, frozen=lengths, pages=pages)

    # -- states -----------------------------------------------------------------------------------

    def take(self, passed: Mapping[int, tuple["Request", Collection[int]]]) -> None:
        """Caches prefixes of prompts that lanes have just prefilled.

        Args:
          passed: for each lane its request, and the lengths of the prefixes.
        """
        lanes = [lane for lane, (_, stops) in passed.items() if stops]
        for lane, rows in self._runner.read_lanes(lanes).items():
            request, stops = passed[lane]
            for stop in stops:
                self._store(lane, request, request.prompt_array[:stop], rows, ended=False)

    def keep(self, leaving: Mapping[int, "Request"]) -> None:
        """Caches the sequences of requests that leave their lanes.

        A sequence that cannot be continued exactly is left out, or cut to its prompt. One whose
        grammar failed is left out: its lane took no steps back.
        """
        lanes = [
            lane
            for lane, request in leaving.items()
            if self.keeps and self.serves(request) and request.generated and not request.failure
        ]
        for lane, rows in self._runner.read_lanes(lanes).items():
            self._keep(lane, leaving[lane], rows)

    def _keep(self, lane: int, request: "Request", rows: Any) -> None:
        prompt, tokens = len(request.prompt), request.sequence[:-1]
        exact = self._policy.prefix_exact(len(tokens), prompt=prompt, max_length=request.max_length)
        seen = int(self._runner.seen[lane])
        if self._runner.appends:
            if seen >= len(tokens):
                self._store(lane, request, tokens[: None if exact else prompt], rows, ended=True)
        elif exact and seen == len(tokens):
            # Not while steps run that were launched before a stop string was found. After an end
            # token the lane is idle in them; if a grammar forced it, the lane took one step back,
            # which wrote to a slot that no later token reads.
            ended = request.finish_reason == "end"
            if ended or not self._runner.reservation.steps_in_flight[lane]:
                self._store(lane, request, tokens, rows, ended=True)

    def _store(
        self,
        lane: int,
        request: "Request",
        tokens: Int[np.ndarray, " n"],
        rows: Any,
        *,
        ended: bool,
    ) -> None:
        allocator, reservation = self._allocator, self._runner.reservation
        lengths, frozen = reservation.lengths_of(lane).copy(), reservation.frozen_of(lane).copy()
        if self._runner.appends:
            tokens = tokens[: self._round_to_pages(len(tokens))]
            lengths[:] = frozen[:] = len(tokens)
        if len(tokens) < self._runner.page_size:
            return
        node = self._tree(request).insert(tokens)
        if node.state is not None:
            if node.state in self._on_device:
                self._touch(node.state)
            return
        changing, copied = self._changing(lengths, frozen)
        if ended:
            changing[:] = False  # the lane leaves them to the state
        pages = allocator.pages_of(lane, lengths)
        state = PrefixState(node, lengths, frozen, pages, rows, ended)
        if changing.any():
            own = allocator.take(copied, besides=_NONE)
            if own is None:  # the pool is full of running requests
                self._move_to_host(state)
                self._forget(pages[changing])
                return
            self._runner.copy_pages(pages[changing], own)
            state.pages = pages.copy()
            state.pages[changing] = own
        allocator.hold(state.pages[~changing])
        node.set_state(state)
        self._on_device[state] = None
        self._replace(lane, state)

    def _replace(self, lane: int, state: PrefixState) -> None:
        """Marks the states that leave first: those that its request continued are replaced.

        With a template that leaves out thoughts, prompts diverge before every answer. So if a
        request did not continue an answer, the next one will continue the end of this prompt, and
        the state of this answer leaves first.
        """
        start, behind_answer = self._continued.get(lane, (0, False))
        if not start or self._runner.appends:  # those share all their pages
            return
        if state.ended and not behind_answer:
            self._leaves_first(state)
            return
        node = state.node.parent
        while node is not None and node.depth >= start:
            if node.state in self._on_device and len(node.children) == 1:
                self._leaves_first(node.state)
            node = node.parent

    def _leaves_first(self, state: PrefixState) -> None:
        """Makes a state the first one to be dropped, without a copy to the host."""
        state.superseded = True
        self._on_device.move_to_end(state, last=False)

    def _touch(self, state: PrefixState) -> None:
        """Makes a state the most recently used one."""
        state.superseded = False
        self._on_device.move_to_end(state)

    def _remove(self, state: PrefixState) -> None:
        """Removes a state from the tree."""
        self._on_device.pop(state, None)
        self._on_host.pop(state, None)
        state.node.set_state(None)

    # -- device and host --------------------------------------------------------------------------

    def _reclaim(self, number: int, count: int) -> None:
        """Frees `count` pages of a free list: the least recently used states leave the device."""
        while count > 0:
            before = count
            for state in list(self._on_device):
                gain = int(self._allocator.yields(state.pages)[number])
                if not gain or state is self._pinned:
                    continue  # running requests hold its pages
                pages = state.pages
                if state.superseded:
                    self._remove(state)
                else:
                    self._move_to_host(state)
                self._allocator.drop(pages)
                count -= gain
                if count <= 0:
                    break
            assert count < before, "prefixes hold fewer pages than they should yield"

    def _forget(self, pages: Int[np.ndarray, " n"]) -> None:
        if self._host is not None:
            self._host.forget_device(pages)

    def _move_to_host(self, state: PrefixState) -> None:
        """Copies a state to host memory, or drops it if there is no room; keeps its pages."""
        host, slots = self._host_pages(), None
        if host is not None:
            cost = host.cost(state.pages)
            if not (cost and host.is_busy) and self._may_copy_now(cost):
                slots = host.add(state.pages, self._runner.read_pages, self._make_room)
                if slots is None:  # nothing is copied
                    self._may_copy += cost
        self._remove(state)
        if slots is None:
            return
        state.node.set_state(state)
        state.pages, self._on_host[state] = slots, None
        state.rows = to_host(state.rows)

    def _may_copy_now(self, size: int) -> bool:
        """Whether `size` bytes may be copied to the host now; counts them if so.

        A copy beyond the burst limit is allowed once the allowance is full.
        """
        now = self.clock()
        gained = TO_HOST * (now - self._asked)
        self._may_copy, self._asked = min(self._may_copy + gained, TO_HOST_AT_ONCE), now
        if size > max(self._may_copy, 0) and self._may_copy < TO_HOST_AT_ONCE:
            return False
        self._may_copy -= size
        return True

    def allocate(self) -> None:
        """Allocates the host memory now, not with the first copies."""
        if (host := self._host_pages()) is not None:
            host.allocate(jax.tree.leaves(self._runner.cache.pool)[0].sharding)

    def _host_pages(self) -> HostPages | None:
        """Returns the pool of host pages, created on first use; None without one."""
        if self._host is None and self.host_blocks:
            self._host = HostPages(*self._host_pool)
        return self._host

    @property
    def host_blocks(self) -> tuple[int, ...]:
        """Sizes of the blocks of pages in which states move to host memory; none if they do not."""
        num_pages, *_ = self._host_pool
        moves = num_pages and self._runner.host is None
        return block_sizes(*self._host_pool) if moves else ()

    @property
    def _host_pool(self) -> tuple[int, int, int]:
        """The arguments of `HostPages`."""
        page_bytes = self._runner.page_bytes
        return self._host_bytes // page_bytes, page_bytes, self._allocator.pages_per_shard

    def _make_room(self) -> bool:
        """Drops the least recently used state in host memory."""
        state = next(iter(self._on_host), None)
        if state is not None:
            self._remove(state)
            assert self._host is not None
            self._host.drop(state.pages)
        return state is not None

    def _load(self, state: PrefixState) -> bool:
        """Brings a state back from host memory; False if the pool has no room for it."""
        host, allocator = self._host, self._allocator
        assert host is not None
        slots = state.pages
        pages = host.on_device(slots)
        away = pages == NO_PAGE
        counts = allocator.pages_for(state.lengths)
        row_of = np.repeat(np.arange(counts.size), counts.ravel())
        needed = np.bincount(row_of[away], minlength=counts.size).reshape(counts.shape)
        allocator.hold(pages[~away])
        del self._on_host[state]  # others make room for it
        if (own := allocator.take(needed, besides=pages[~away])) is None:
            allocator.drop(pages[~away])
            self._on_host[state] = None
            return False
        self._write(slots[away], own)
        state.rows = to_device(state.rows)
        pages[away] = own
        host.match(slots[away], own)
        host.drop(slots)
        state.pages = pages
        self._on_device[state] = None
        return True
