"""Cached prefixes: the cache of beginnings that were read before, with the policy's state.

A request whose prompt begins as one that was read before continues from there:

    "system, document, question 1"      states   after the document
    "system, document, question 2"      ------>  reads its question alone

What is exact. A state may be continued if it depends on its tokens alone (`Policy.prefix_exact`):
always where a policy decides from the tokens before a query, in prompts and answers alike (Vanilla,
DMS, DMC, StreamingLLM, KVzap, TOVA and H2O token by token); within the prompt for policies that
read answers in another way (Quest, KCache); and before its end for those that cut it there (SnapKV
and similar policies, TOVA and H2O with dense prompts), or behind that as long as the budget was not
reached. What was cut is never continued here: a `Conversation` does that, turn by turn.

How it is stored. Policies that evict write over old slots in place, so that a page holds another
prefix a few tokens later: their states are copies, at a few places of a sequence. The copy is of
what the policy keeps: 100 MB take some 0.05 ms at the rate of an H200's memory (not timed). A
policy that only appends (`Policy.appends`) never writes to a full page again: its states share
whole pages with the sequences and with each other, cost nothing, and serve every prefix that is
whole pages long. When a request ends nothing writes to its pages any more: they become a state as
they are.

Where states are taken (as Marconi does, arXiv 2411.19379):

    where known prompts part     a beginning that several share, at the last whole page before; or
                                 all of a prompt of which copies wait that have no lane yet
    near the end of a prompt     at its last whole page, as templates often change what follows
    at the end of an answer      the next turn of an agent begins with it

Only the first is taken for the requests of a closed list whose engine keeps no prefixes; and a
request waits for a prefix that another one is reading.

Where they are. In pages of the pool that no row needs: they count as free, and rows that need them
get them from the prefixes that were used least recently. These go to host memory, up to a number of
bytes, from where they come back when they are used; beyond it they are dropped. So they are where
more leave the device than may be copied (`TO_HOST`): everybody waits for a copy. A state that a
later one of the same session replaces goes first, unless another request parts from it: an agent
holds one state, not one a turn.

A tree belongs to one engine and one of its adapters, so that model, adapter, dtype, policy and
cache format are those of its states; its tokens are those behind the chat template. A policy whose
decisions depend on the longest length of a request has a tree for each. With other weights
(`Engine.update`) there are other trees. Caches on a mesh keep no prefixes.
"""

import collections
import dataclasses
import time
import weakref
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jaxtyping import Int

from dms_jax.cache.host_pages import NO_PAGE, HostPages
from dms_jax.errors import ConfigError
from dms_jax.generation.prefix_tree import Node, PrefixTree

if TYPE_CHECKING:
    from dms_jax.generation.prefill import Prefill
    from dms_jax.generation.requests import Request
    from dms_jax.generation.runner import Runner


# Bytes that are copied to the host in a second, in the mean, and at once. An H200's host takes 2.2
# GB a second, so copies take a twentieth of the time at most. Without a limit 256 prompts of 8,192
# tokens took 43 s in place of 16 (1.5B, vanilla): the pool was full of prefixes of other prompts,
# 60 GB, of which each left for the host and was dropped there for the next one.
TO_HOST, TO_HOST_AT_ONCE = 1e8, 2.0**30


@dataclasses.dataclass(eq=False)
class PrefixState:
    """What the cache holds after some tokens.

    Attributes:
      node: its place in the tree, whose depth is the number of tokens.
      lengths: slots in use of each row.
      pages: the pages of the rows, row by row: of the device's pool, or of the one on the host.
      rows: the policy's state of each row, leaves [L, K, ...].
      ended: whether an answer ends here.
    """

    node: Node
    lengths: Int[np.ndarray, "L K"]
    pages: Int[np.ndarray, " n"]
    rows: Any
    ended: bool = False


@dataclasses.dataclass(frozen=True)
class PrefixCounts:
    """What prefixes hold.

    Attributes:
      states, host_states: prefixes in the pool, and in host memory.
      bytes, host_bytes: bytes of their pages there; a page that several share counts once, and one
        that a running request shares counts too.
    """

    states: int = 0
    host_states: int = 0
    bytes: int = 0
    host_bytes: int = 0


class Prefixes:
    """The cached prefixes of a runner.

    Args:
      runner: the runner whose pages they take.
      host_bytes: the most bytes in host memory; None for prefixes that are shared by the requests
        of a call and then dropped.

    Attributes:
      keeps: whether they are kept for requests that nobody knows yet.
      closed: whether all requests of the running call are known.

    Raises:
      ConfigError: prefixes are to be kept on a mesh.
    """

    def __init__(self, runner: "Runner", host_bytes: float | int | None):
        # Not a cycle, in which the memory of a runner would outlive it.
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
        """Forgets all prefixes, whose pages are gone; the runner has an allocator of new ones."""
        for state in (*self._on_device, *self._on_host):
            state.rows = None  # what they hold of the device's memory goes now
            state.node.state = None
        self._trees: dict[tuple[str | None, int | None], PrefixTree] = {}
        self._on_device.clear()
        self._on_host.clear()
        # By lane, what its request continues: the tokens, and whether they end in an answer.
        self._continued: dict[int, tuple[int, bool]] = {}
        self._pinned: PrefixState | None = None
        self._leaving: list[PrefixState] = []  # whose rows are on their way to the host
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
        """The names of the adapters that have read prefixes; None is the model as it is."""
        return {adapter for adapter, _ in self._trees}

    def drop(self, adapter: str | None) -> None:
        """Drops the prefixes that an adapter has read, and frees their pages."""
        for key in [key for key in self._trees if key[0] == adapter]:
            for state in list(self._trees.pop(key).root.all_states()):
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
        """Returns the tree of requests whose states depend on their tokens as this one's do."""
        policy = self._policy
        by_length = policy.parallel == "never" and policy.for_length(1) is not policy
        key = request.adapter, request.max_length if by_length else None
        return self._trees.setdefault(key, PrefixTree())

    def _whole(self, tokens: int) -> int:
        """Returns the tokens of the whole pages of so many."""
        return tokens - tokens % self._runner.page_size

    # -- what requests have in common -------------------------------------------------------------

    def serves(self, request: "Request") -> bool:
        """Whether a request may begin with a prefix: not one that continues a conversation."""
        if self._on_mesh or not (self.keeps or self.closed):
            return False
        past = request.seen or request.before or request.base is not None
        return bool(request.prompt) and not past

    def note(self, request: "Request") -> None:
        """Adds the prompt of a request that waits to the tree."""
        if self.serves(request):
            node = self._tree(request).insert(request.prompt_array)
            node.ends, node.waiting = True, node.waiting + 1

    def begin(self, lane: int, request: "Request") -> None:
        """Notes that a request waits no more, but has a lane."""
        self._continued.pop(lane, None)
        self.waits_no_more(request)

    def waits_no_more(self, request: "Request") -> None:
        """Takes a request that was noted out of those that wait."""
        if self.serves(request):
            self._tree(request).insert(request.prompt_array).waiting -= 1

    def read_now(self, prefills: Collection["Prefill"]) -> set[Node]:
        """Returns the prefixes that become states soon, and the ends of prompts that are read."""
        served = (item for item in prefills if self.serves(item.request))
        return {node for item in served for node in self._nodes(item.request, item.stops)}

    def will_read(self, request: "Request") -> set[Node]:
        """Returns the same of a request that is admitted next."""
        if not self.serves(request):
            return set()
        found = self._find(request, *self._readable(request))
        return self._nodes(request, self.stops(request, found[1] if found else 0, 1))

    def _nodes(self, request: "Request", stops: Collection[int]) -> set[Node]:
        """Returns the nodes at some tokens of a request, and at the end of its prompt."""
        tree, tokens = self._tree(request), request.prompt_array
        return {tree.insert(tokens[:each]) for each in (*stops, len(tokens))}

    def waits(self, request: "Request", read_now: set[Node]) -> bool:
        """Whether a longer prefix of a request than any that is cached is being read.

        An equal prompt is copied when it is read, which is no reason to wait.
        """
        if not read_now or request.generated or not self.serves(request):
            return False
        tokens = request.prompt_array
        path, _, last = self._tree(request).walk(tokens)
        if last.depth == len(tokens) and last in read_now:
            return False
        coming = max((node.depth for node in path if node in read_now), default=0)
        if coming >= len(tokens):
            return False
        found = self._find(request, tokens, len(tokens) - 1)
        return coming >= (found[1] if found else 0) + self._runner.page_size

    def stops(self, request: "Request", start: int, admitted: int = 0) -> tuple[int, ...]:
        """Returns where states are to be taken of a prompt, in tokens.

        Args:
          request: the request.
          start: tokens that are cached.
          admitted: how many of those that wait are admitted at once, it included.
        """
        if not self.serves(request):
            return ()
        most = len(request.prompt) - 1
        path, _, _ = self._tree(request).walk(request.prompt_array)
        parts = {
            node.depth
            for node in path
            if len(node.children) + node.ends > 1 or node.waiting > admitted
        }
        parts |= {most} if self.keeps else set()
        whole = {self._whole(min(each, most)) for each in parts}
        least = start + self._runner.page_size  # less is not worth a program of its own
        return tuple(sorted(each for each in whole if each >= least))

    def shared_slots(self, request: "Request") -> int:
        """Returns the slots of each row that a request shares with running ones at once."""
        if not (self._runner.appends and self.serves(request)):
            return 0
        found = self._find(request, *self._readable(request))
        if found is None or found[0] not in self._on_device:
            return 0
        state, count = found
        pages = self._first_pages(state, count)
        held = self._allocator.held_by_rows(pages.ravel()) // (pages.size // pages.shape[-1])
        return held * self._runner.page_size

    # -- lookup -----------------------------------------------------------------------------------

    def _readable(self, request: "Request") -> tuple[Int[np.ndarray, " n"], int]:
        """Returns what a request prefills, and how many tokens of it a prefix may have at most.

        One that continues its answer knows the token that comes next. Others need the hidden state
        of the last token of their prompt, or those do that share it; and policies that cut prompts
        need their end.
        """
        if len(request.generated) > 1 and self._policy.parallel != "prompts":
            tokens = request.sequence[:-1]
            return tokens, len(tokens)
        return request.prompt_array, len(request.prompt) - 1

    def _find(
        self, request: "Request", tokens: Int[np.ndarray, " n"], most: int
    ) -> tuple[PrefixState, int] | None:
        """Returns the state that serves the longest prefix of at most so many tokens, and that."""
        path, known, last = self._tree(request).walk(tokens)
        stated = (node for node in path[::-1] if node.state is not None and node.depth <= most)
        found = next(((node.state, node.depth) for node in stated), None)
        if not self._runner.appends:
            return found
        # The first pages of any state that goes on from where the tokens part from it.
        for common, node in ((known, last), *((node.depth, node) for node in path[::-1])):
            whole = self._whole(min(common, most))
            if whole <= (found[1] if found else 0):
                break
            if (state := node.state_behind(whole)) is not None:
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
        appends = self._runner.appends
        lengths = np.full_like(state.lengths, count) if appends else state.lengths
        if state in self._on_host and not self._load(state):
            if not self._write_to(lane, state, lengths):
                return 0
        elif appends:
            self._touch(state)
            self._allocator.share(lane, self._first_pages(state, count))
        else:
            self._touch(state)
            self._copy_to(lane, state)
        self._runner.load_lane(lane, lengths, count, state.rows)
        self._continued[lane] = count, state.ended
        request.meter.read_before(int(lengths.sum()))
        return count

    def _copy_to(self, lane: int, state: PrefixState) -> None:
        """Gives a lane copies of the pages of a state, or these themselves for want of others."""
        allocator, counts = self._allocator, self._allocator.pages_for(state.lengths)
        if allocator.can_take(counts, besides=state.pages):
            self._pinned = state
            allocator.give(lane, counts)
            self._pinned = None
            self._runner.copy_pages(state.pages, allocator.pages_of(lane, state.lengths))
            return
        pages = state.pages
        self._move_to_host(state)
        allocator.give(lane, counts, pages)
        self._forget(pages)  # they change

    def _write_to(self, lane: int, state: PrefixState, lengths: Int[np.ndarray, "L K"]) -> bool:
        """Gives a lane what is in host memory; False if the pool has no room for it.

        Args:
          lane: the lane, which is empty.
          state: the state, for which the pool has no room besides.
          lengths: the slots of each row that are wanted of it.
        """
        allocator, counts = self._allocator, self._allocator.pages_for(lengths)
        if not allocator.can_take(counts):
            return False
        del self._on_host[state]  # what yields pages makes room for itself, but not here
        allocator.give(lane, counts)
        self._on_host[state] = None
        held = allocator.pages_for(state.lengths)
        first = np.arange(held.max()) < counts[..., None]
        slots = state.pages[first[np.arange(held.max()) < held[..., None]]]
        self._write(slots, allocator.pages_of(lane, lengths))
        return True

    def _write(self, slots: Int[np.ndarray, " n"], pages: Int[np.ndarray, " n"]) -> None:
        """Copies pages of host memory to pages of the pool."""
        assert self._host is not None
        for which, block in self._host.read(slots):
            self._runner.write_pages(pages[which], block)

    def _first_pages(self, state: PrefixState, count: int) -> Int[np.ndarray, "L K m"]:
        """Returns the pages of the first tokens of a state whose rows are all alike."""
        columns = state.pages.reshape(*state.lengths.shape, -1)
        return columns[..., : count // self._runner.page_size]

    # -- states -----------------------------------------------------------------------------------

    def take(self, lane: int, request: "Request", count: int) -> None:
        """Caches the first tokens of a prompt, which a lane has just read."""
        self._store(lane, request, request.prompt_array[:count], ended=False)

    def keep(self, lane: int, request: "Request") -> None:
        """Caches the sequence of a request that leaves its lane, as far as that is exact."""
        if not (self.keeps and self.serves(request) and request.generated):
            return
        prompt, tokens = len(request.prompt), request.sequence[:-1]
        exact = self._policy.prefix_exact(len(tokens), prompt=prompt, max_length=request.max_length)
        seen = int(self._runner.seen[lane])
        if self._runner.appends:
            if seen >= len(tokens):
                self._store(lane, request, tokens[: None if exact else prompt], ended=True)
        elif exact and seen == len(tokens):
            # Not if steps go on that were launched before a stop string was found. In those behind
            # an end token the lane is idle.
            ended = request.finish_reason == "end"
            if ended or not self._runner.reservation.steps_in_flight[lane]:
                self._store(lane, request, tokens, ended=True)

    def _store(
        self, lane: int, request: "Request", tokens: Int[np.ndarray, " n"], *, ended: bool
    ) -> None:
        allocator, lengths = self._allocator, self._runner.reservation.lengths_of(lane)
        if self._runner.appends:
            tokens = tokens[: self._whole(len(tokens))]
            lengths = np.full_like(lengths, len(tokens))
        if len(tokens) < self._runner.page_size:
            return
        node = self._tree(request).insert(tokens)
        if node.state is not None:
            if node.state in self._on_device:
                self._touch(node.state)
            return
        pages = allocator.pages_of(lane, lengths)
        state = PrefixState(node, lengths.copy(), pages, self._runner.read_lane(lane), ended)
        if ended or self._runner.appends:
            allocator.hold(pages)
        elif (own := allocator.take(allocator.pages_for(lengths))) is not None:
            self._runner.copy_pages(pages, own)
            state.pages = own
        else:  # the pool is full of running requests
            self._move_to_host(state)
            self._forget(pages)  # they change
            return
        node.set_state(state)
        self._on_device[state] = None
        self._replace(lane, state)

    def _replace(self, lane: int, state: PrefixState) -> None:
        """Lets what a state replaces go first: what its request continued, and its own prompt's.

        Templates that leave out what a model thought part from every answer: where a request did
        not continue an answer, the next one will not either, but the end of its prompt.
        """
        start, behind_answer = self._continued.get(lane, (0, False))
        if not start or (state.ended and not behind_answer):
            return
        node = state.node.parent
        while node is not None and node.depth >= start:
            replaced = node.state in self._on_device and len(node.children) == 1
            if replaced and not self._runner.appends:  # else it holds nothing of its own
                self._on_device.move_to_end(node.state, last=False)
            node = node.parent

    def _touch(self, state: PrefixState) -> None:
        """Makes a state the most recently used one."""
        self._on_device.move_to_end(state)

    def _remove(self, state: PrefixState) -> None:
        """Removes a state from the tree."""
        self._on_device.pop(state, None)
        self._on_host.pop(state, None)
        state.node.set_state(None)

    # -- device and host --------------------------------------------------------------------------

    def _reclaim(self, number: int, count: int) -> None:
        """Frees so many pages of a free list: states leave the device, the oldest first."""
        while count > 0:
            before = count
            for state in list(self._on_device):
                gain = int(self._allocator.yields(state.pages)[number])
                if not gain or state is self._pinned:
                    continue  # running requests hold its pages
                pages = state.pages
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
        """Copies a state to host memory, or drops it for want of room; its pages are not freed."""
        host, slots = self._host_pages(), None
        if host is not None and self._takes_time(size := host.bytes_of(state.pages)):
            slots = host.add(state.pages, self._runner.read_pages, self._make_room)
            if slots is None:  # nothing is copied
                self._may_copy += size
        self._remove(state)
        if slots is None:
            return
        state.node.set_state(state)
        state.pages, self._on_host[state] = slots, None
        for leaf in jax.tree.leaves(state.rows):
            if isinstance(leaf, jax.Array):
                leaf.copy_to_host_async()
        self._leaving = [each for each in self._leaving if not _left(each)] + [state]

    def _takes_time(self, size: int) -> bool:
        """Whether there is time to copy so many bytes to the host; counts them if so.

        What is larger than may be copied at once has its turn when nothing was for long enough.
        """
        now = self.clock()
        gained = TO_HOST * (now - self._asked)
        self._may_copy, self._asked = min(self._may_copy + gained, TO_HOST_AT_ONCE), now
        if size > max(self._may_copy, 0) and self._may_copy < TO_HOST_AT_ONCE:
            return False
        self._may_copy -= size
        return True

    def _host_pages(self) -> HostPages | None:
        """Returns the pages in host memory, made when they are first needed; None for none."""
        num_pages = self._host_bytes // self._runner.page_bytes
        if self._host is None and num_pages and self._runner.host is None:
            block = self._runner.page_block()
            self._host = HostPages(block, num_pages, self._allocator.pages_per_shard)
        return self._host

    def _make_room(self) -> bool:
        """Drops the state in host memory that was used least recently."""
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
        if (own := allocator.take(needed)) is None:
            allocator.drop(pages[~away])
            self._on_host[state] = None
            return False
        self._write(slots[away], own)
        pages[away] = own
        host.match(slots[away], own)
        host.drop(slots)
        state.pages = pages
        self._on_device[state] = None
        return True


def _left(state: PrefixState) -> bool:
    """Puts the copy of a state's rows on the host in their place, if it is there; returns that."""
    leaves = jax.tree.leaves(state.rows)
    there = all(isinstance(leaf, np.ndarray) or leaf.is_ready() for leaf in leaves)
    if there:
        state.rows = jax.tree.map(np.asarray, state.rows)
    return there
