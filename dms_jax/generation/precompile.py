"""Compiles the programs that requests need in parallel, before they are needed.

Programs that an earlier process kept (`executables`) are read in threads. The others are traced
here, one after the other, and compiled in threads. A closed list compiles its first programs
(`compile_first`); the rest is compiled on first use: wider page tables for long answers, and
prompts that are recomputed after a preemption. A server compiles everything that can occur
(`compile_all`).
"""

import concurrent.futures
import dataclasses
import itertools
import os
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from dms_jax import compilation
from dms_jax.generation import checked_steps, grammar, programs
from dms_jax.generation.copies import no_load
from dms_jax.generation.prefill import (
    PromptShapes,
    Shape,
    cuts_prompts,
    tokens_in_one_pass,
)
from dms_jax.generation.requests import Request
from dms_jax.generation.runner import Runner, sends_changes
from dms_jax.generation.sampling import Filter, Given, LanesFilter
from dms_jax.model.language_model import use_mesh

# A program (`programs.Program`) and the arguments that it is compiled for.
_Call = tuple[Any, tuple[Any, ...]]


def compile_first(
    runner: Runner,
    shapes: PromptShapes,
    requests: Sequence[Request],
    rule: Filter | None,
    num_steps: int,
    end_tokens: tuple[int, ...],
    compiled: set[Hashable],
) -> None:
    """Compiles the first programs of a closed list: prefill, first tokens, and steps.

    If requests wait for a lane, that includes the prefill of the few prompts that follow when lanes
    end.

    Args:
      runner: the runner that will launch them.
      shapes: the shapes of prompts.
      requests: the requests.
      rule: sampling settings; None if answers are given.
      num_steps: steps per program.
      end_tokens: token ids that end an answer.
      compiled: keys of earlier calls; the key of this one is added.
    """
    num_lanes = runner.num_lanes
    # Equal prompts are prefilled once; chains mostly share one list object.
    first = {(each.adapter, id(each.prompt)): each for each in requests[:num_lanes]}
    unique = {(each.adapter, tuple(each.prompt)): each for each in first.values()}
    refilled = len(requests) > num_lanes

    # The parts of each prompt, split where prefixes are cached: tokens in one pass, and the rest.
    parts = [part for each in unique.values() for part in _parts(runner, each)]
    shared = len(parts) > len(unique) or any(start for start, *_ in parts)
    if refilled := refilled or shared:
        parts = {part for each in requests for part in _parts(runner, each)}
    policy = runner.policy
    whole, rest = [], []
    for start, end, most in parts:
        ends = tokens_in_one_pass(policy, prompt=end, max_length=most)
        whole.append(min(max(ends, start), end) - start)
        rest.append(end - start - whole[-1])
    batches = [
        each
        for own, counts in zip(shapes, (whole, rest), strict=True)
        for each in _programs(runner, own.batches(filter(None, counts), refilled=refilled))
    ]
    reservation = runner.reservation
    pages, pages_of_steps = reservation.table_width(1), reservation.table_width(1, steps=True)
    drawn = any(not each.generated for each in requests)
    steps = any(each.remaining > (not each.generated) for each in requests)
    form = jax.tree.structure(rule)
    grammars = [each.sampling.grammar for each in requests if each.sampling.grammar is not None]
    openings = frozenset(isinstance(each, grammar.Opening) for each in grammars)
    masked = bool(openings)
    key = (form, openings, drawn, steps, num_steps, end_tokens, pages, pages_of_steps, *batches)
    if key in compiled:
        return
    compiled.add(key)
    calls = _Calls(runner, rule)
    _compile(
        runner,
        (
            # Steps take the compiler longest: they come first, while prompts are traced.
            *([calls.steps(pages_of_steps, num_steps, end_tokens)] if steps and not masked else []),
            *(calls.checked([pages_of_steps], [num_steps], end_tokens, openings) if steps else []),
            *(calls.update_table(pages_of_steps) if steps else []),
            *(calls.extend(shape, pages, ends=ends) for shape, ends in batches),
            *([calls.first_tokens(masked=masked)] if drawn else []),
            *(calls.keep_hidden(entries) for entries in {shape.entries for shape, _ in batches}),
            *(calls.copy_lanes() if len(unique) < min(len(requests), num_lanes) else []),
            *calls.set_max_lengths(),
            calls.clear(),
            *(calls.states() if shared else []),
        ),
    )


def _parts(runner: Runner, request: Request) -> list[tuple[int, int, int]]:
    """Returns the parts in which a prompt is prefilled: start, end, and its longest length."""
    start = runner.prefixes.cached(request)
    stops = runner.prefixes.stops(request, start, runner.num_lanes)
    stops = (start, *stops, len(request.prompt))
    return [(*part, request.max_length) for part in itertools.pairwise(stops)]


def _programs(runner: Runner, batches: Iterable[tuple[Shape, bool]]) -> list[tuple[Shape, bool]]:
    """Returns the programs to compile, each with whether a prompt ends in it.

    Only policies that cut rows after a prompt have a separate program for that.
    """
    found = {(shape, ends or not cuts_prompts(runner.policy, shape)) for shape, ends in batches}
    return sorted(found, key=str)  # in the same order in every process


def compile_all(
    runner: Runner, shapes: PromptShapes, num_steps: set[int], end_tokens: tuple[int, ...]
) -> int:
    """Compiles all programs of an open stream; returns their number.

    These are all shapes of prefill and steps with all widths of the page table, also for answers
    that are recomputed after a preemption, and the small programs between them. Sequences have at
    most the runner's maximum length.

    Args:
      runner, shapes, end_tokens: see `compile_first`.
      num_steps: the possible numbers of steps per program.
    """
    num_lanes = runner.num_lanes
    calls = _Calls(runner, LanesFilter(num_lanes).of({}))
    policy, most = runner.policy, runner.max_tokens
    whole = tokens_in_one_pass(policy, prompt=most, max_length=most)
    # After a one-pass prompt any number of answer tokens may be recomputed.
    rest = {"always": 0, "prompts": most, "never": most - whole}[policy.parallel]
    every = _programs(runner, shapes.one_pass.every(whole) | shapes.one_by_one.every(rest))
    prompts = [
        calls.extend(shape, pages, ends=ends)
        for shape, ends in every
        for pages in runner.reservation.table_widths()
    ]
    widths = runner.reservation.table_widths(steps=True)
    steps = [
        calls.steps(pages, size, end_tokens)
        for size in sorted(num_steps, reverse=True)
        for pages in widths
    ]
    for pages in widths:
        steps += calls.update_table(pages)
    if grammar.is_served(runner.model):
        steps += calls.checked(widths, num_steps, end_tokens, {False, True})
        steps += [calls.first_tokens(masked=True)]
    prefixes = [*calls.states(), *calls.host_pages()] if runner.prefixes.keeps else []
    hidden = [calls.keep_hidden(entries) for entries in {shape.entries for shape, _ in every}]
    lanes = [calls.clear(), *calls.set_max_lengths(), *calls.copy_lanes()]
    # Equal arguments are one program: with fixed lanes, every lane has an entry.
    every_call = (*prompts, *steps, calls.first_tokens(), *hidden, *lanes, *prefixes)
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        allocated = thread.submit(runner.prefixes.allocate)
        count = _compile(runner, every_call)
        allocated.result()
    return count


@dataclasses.dataclass(frozen=True)
class _Calls:
    """The programs of a runner with arguments of the right shapes; values do not matter."""

    runner: Runner
    rule: Filter | None

    def _rule(self, count: int, masked: bool = False) -> Filter | Given:
        if masked and self.rule is not None:
            size = self.runner.model.config.vocab_size
            masks = grammar.masks_of({}, self.runner.num_lanes, size)
            return dataclasses.replace(self.rule, allowed=masks)
        return self.rule or Given(np.zeros((count, self.runner.num_lanes), np.int32))

    @property
    def _lanes(self) -> np.ndarray:
        return np.zeros(self.runner.num_lanes, np.int32)

    @property
    def _seeds(self) -> np.ndarray:
        return self.runner.seeds

    def _table(self, entries: int, pages: int) -> np.ndarray:
        num_layers, _, num_kv_heads = self.runner.reservation.allocator.reserved.shape
        return np.zeros((num_layers, entries, num_kv_heads, pages), np.int32)

    def _entries(self, entries: int) -> int:
        return len(self._lanes) if self.runner.fixed_lanes else entries

    def extend(self, shape: Shape, pages: int, *, ends: bool = True) -> _Call:
        entries, policy = self._entries(shape.entries), self.runner.policy
        counts = np.zeros(entries, np.int32)
        cut = np.zeros(entries, bool) if ends and cuts_prompts(policy, shape) else None
        rows = None if self.runner.fixed_lanes else counts
        tokens, table = np.zeros((entries, shape.width), np.int32), self._table(entries, pages)
        given = (table, rows, tokens, counts, cut, self.runner.traced_policy)
        return programs.extend, (*self.runner.cached, *given, shape.one_pass, shape.places)

    def steps(
        self, pages: int, num_steps: int, end_tokens: tuple[int, ...], *checks: programs.Checks
    ) -> _Call:
        lanes, table = self._lanes, self.runner.everywhere(self._table(len(self._lanes), pages))
        tokens, policy = self.runner.everywhere(lanes), self.runner.traced_policy
        before = *self.runner.cached, table, tokens, lanes, self._seeds, policy
        rest = self._rule(num_steps), num_steps, end_tokens, *checks
        return programs.decode, (*before, *rest)

    def checked(
        self,
        widths: Iterable[int],
        num_steps: Iterable[int],
        end_tokens: tuple[int, ...],
        openings: Collection[bool],
    ) -> list[_Call]:
        """Returns the steps of lanes with a grammar, and what draws their tokens again.

        Tokens are drawn again for a few lanes, or all.

        Args:
          widths: widths of the page table.
          num_steps: the possible numbers of steps per program.
          end_tokens: token ids that end an answer.
          openings: whether lanes have an opening; both, if some have and others do not.
        """
        if not openings:
            return []
        runner, num_lanes, calls = self.runner, len(self._lanes), list[_Call]()
        outer, tokens = runner.model.transformer.without_layers(), runner.everywhere(self._lanes)
        for size in sorted({1, *map(runner.checked_size, num_steps)}, reverse=True):
            calls += [
                self.steps(pages, size, end_tokens, programs.Checks(forced))
                for opened in openings
                for forced in (np.zeros((size, num_lanes), np.int32) if opened else None,)
                for pages in widths
            ]
            trail = runner.blank_trail(size)
            given = [(None, trail, None)]
            if trail.overwritten is not None:
                tables = [runner.everywhere(self._table(num_lanes, pages)) for pages in widths]
                given = [(table, trail, trail) for table in tables]
            for count in sorted({min(checked_steps.FEW, num_lanes), num_lanes}):
                masks = grammar.masks_of({}, count, runner.model.config.vocab_size)
                rest = tokens, np.zeros((3, count), np.int32), masks, self._seeds, self._rule(1)
                calls += [(programs.redraw, (outer, runner.cache, *own, *rest)) for own in given]
        return calls

    def update_table(self, pages: int) -> list[_Call]:
        table = self._table(len(self._lanes), pages)
        if not sends_changes(table.size):
            return []
        cells = self.runner.no_cells(table.shape)
        return [(programs.update_table, (self.runner.everywhere(table), cells))]

    def first_tokens(self, *, masked: bool = False) -> _Call:
        lanes, fresh = self._lanes, self._lanes > 0
        given = (self._seeds, lanes, self._rule(1, masked), fresh, self.runner.everywhere(lanes))
        return programs.first_tokens, (
            self.runner.model.transformer.without_layers(),
            self.runner.hidden,
            lanes,
            *given,
        )

    def keep_hidden(self, entries: int) -> _Call:
        kept, entries = self.runner.hidden, self._entries(entries)
        hidden = self.runner.everywhere(np.zeros((entries, kept.shape[1]), kept.dtype))
        return programs.keep_hidden, (kept, hidden, np.zeros(entries, np.int32))

    def clear(self) -> _Call:
        model = self.runner.model
        settings = (model.config, self.runner.traced_policy, model.dtype)
        return programs.clear, (self.runner.cache, self._lanes > 0, *settings)

    def set_max_lengths(self) -> list[_Call]:
        if self.runner.policy.for_length(1) is self.runner.policy:
            return []
        return [(programs.set_max_lengths, (self.runner.cache, self._lanes))]

    def copy_lanes(self) -> list[_Call]:
        if len(self._lanes) == 1:
            return []
        pages = self.runner.no_pages()
        num_kv_heads = self.runner.reservation.allocator.reserved.shape[2]
        return [(programs.copy_lanes, (self.runner.cache, pages, self._lanes, num_kv_heads))]

    def states(self) -> list[_Call]:
        """Returns the programs that take the state of lanes, copy their pages and put it back."""
        runner, cache, calls = self.runner, self.runner.cache, list[_Call]()
        lanes = np.zeros(runner.copies.group, np.int32)
        calls.append((programs.load_lanes, no_load(cache, lanes)))
        if jax.tree.leaves(cache.row_state):
            calls.append((programs.read_lanes, (cache, lanes)))
        if not runner.appends:
            for size in runner.copies.blocks:
                calls.append((programs.copy_pages, (cache, np.zeros((2, size), np.int32))))
        return calls

    def host_pages(self) -> list[_Call]:
        """Returns the programs that move pages to the host and back."""
        cache, calls = self.runner.cache, list[_Call]()
        for size in self.runner.prefixes.host_blocks:
            pages = np.zeros(size, np.int32)
            stored = cache.pool, cache.page_state
            block = jax.tree.map(lambda x, n=size: np.zeros((n, *x.shape[1:]), x.dtype), stored)
            calls.append((programs.read_pages, (cache, pages)))
            calls.append((programs.write_pages, (cache, pages, block)))
        return calls


def _compile(runner: Runner, calls: Iterable[_Call]) -> int:
    """Reads or compiles programs for their arguments in threads; returns their number.

    On an error or an interrupt it cancels queued compilations and waits for running ones: a process
    that exits while the compiler runs in a thread aborts.
    """
    calls = list(calls)
    threads = max(4, os.cpu_count() or 1)
    with (
        concurrent.futures.ThreadPoolExecutor(threads) as pool,
        use_mesh(runner.model.mesh),
    ):
        try:
            left = _read(pool, calls)
            with compilation.counted(len(left)) as count:
                running = []
                for program, given in left:
                    running.append(pool.submit(program.compiling(*given)))
                    running[-1].add_done_callback(lambda _: count())
                for each in concurrent.futures.as_completed(running):
                    each.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return len(calls)


def _read(pool: concurrent.futures.Executor, calls: list[_Call]) -> list[_Call]:
    """Reads executables from disk; returns the calls without one."""
    with compilation.counted(len(calls), "Loading") as count:
        running = []
        for program, given in calls:
            running.append(pool.submit(program.reading(*given)))
            running[-1].add_done_callback(lambda _: count())
        found = [each.result() for each in running]
    return [call for call, there in zip(calls, found, strict=True) if not there]
