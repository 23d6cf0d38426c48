"""The scheduler: which sequences are in the cache, and what runs next.

A request waits, is admitted to a lane when the pool can hold what its prompt takes at least, is
prefilled in chunks, and decodes in chunks until it ends. Of equal prompts that are read at the same
time one is prefilled, and copied to the lanes of the others as far as the pool holds them.

Where requests come while others run, chunks of prompts and chunks of steps take turns: nobody's
answer waits for more than a chunk of another's prompt. What is told of a chunk is told while the
next programs run. A call whose prompts are all known reads
those that have a lane first, so that the chunks of steps behind them are full. So does one with a
policy that cuts a dense prompt: its steps have page tables for the cut rows alone.

The pages that a chunk may need are reserved before it runs. If they do not fit, the youngest
running request is preempted: it returns to the queue with its tokens and is recomputed later, the
prompt as a prompt and the answer as an answer, so that every policy decides as it did before.

Programs are launched before the results of those before them are read, as far as nobody waits for
these: prompts, the first tokens after them, and chunks of steps. A long chunk is several programs.
While requests wait for a lane all but the last are read before the next chunk is launched, since a
lane that ended would be idle in it; the last one runs meanwhile, so that the device is not:

    device  | steps  steps  steps  steps | prompts | first tokens | steps ...
    host                             | ends, admissions, launches of these | reads the last, ...
"""

import collections
import threading
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Unpack

import numpy as np

from dms_jax import compilation
from dms_jax.checks import Whole, check, show_options
from dms_jax.errors import ConfigError
from dms_jax.generation import sharing
from dms_jax.generation.arrivals import Arrivals, Incoming
from dms_jax.generation.calls import keep_finished, unless_busy
from dms_jax.generation.launched import Launched
from dms_jax.generation.memory import pool_pages
from dms_jax.generation.options import EngineKeywords, EngineOptions
from dms_jax.generation.programs import bucket
from dms_jax.generation.prompts import check_call, check_list, check_stop, encode_prompts
from dms_jax.generation.reading import Reading
from dms_jax.generation.reporting import Reporter, record_peak_bytes
from dms_jax.generation.requests import (
    Completion,
    OnTokens,
    Prompt,
    Request,
    completion_of,
    finished,
    make_requests,
)
from dms_jax.generation.room import Room
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Sampling
from dms_jax.generation.text import TextTracker
from dms_jax.generation.warming import compile_all, compile_first
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.policies import Policy


class Engine:
    """A model, a policy and a pool, ready to serve requests.

    It serves one call at a time: a second one, from another thread or from inside a callback,
    raises BusyError and changes nothing. Threads that generate in parallel need an engine each.

    Args:
      model: the model to run.
      policy: the cache policy; None for the one that the checkpoint declares.
      num_lanes, max_tokens, memory, chunk, **options: see `EngineOptions`.

    Raises:
      ConfigError: an option is malformed, or the policy does not fit the model.
      CapacityError: the memory does not hold the first page of each row of a single sequence, or
        what so many lanes take besides their pages.
    """

    @show_options(EngineOptions)
    def __init__(
        self,
        model: LanguageModel,
        policy: Policy | str | None = None,
        *,
        num_lanes: int = 8,
        max_tokens: int | None = None,
        memory: float | int | None = None,
        chunk: int = 32,
        **options: Unpack[EngineKeywords],
    ):
        check_model(model)
        compilation.prepare()
        self.options = EngineOptions(num_lanes, max_tokens, memory, chunk, **options)
        num_lanes, page_size = self.options.num_lanes, self.options.page_size
        self.model, self.policy = model, model.resolve_policy(policy)
        positions = model.config.max_position_embeddings
        max_tokens = min(self.options.max_tokens or positions, positions)
        self.chunk = min(self.options.chunk, bucket(max_tokens))  # no answer has more steps
        self.runner = Runner(
            model,
            self.policy,
            num_lanes=num_lanes,
            num_pages=pool_pages(
                model,
                self.policy,
                num_lanes=num_lanes,
                max_tokens=max_tokens,
                page_size=page_size,
                memory=self.options.memory,
                kv_dtype=self.options.kv_dtype,
            ),
            page_size=page_size,
            max_tokens=max_tokens,
            table_width=self.options.table_width,
            kv_dtype=self.options.kv_dtype,
        )
        self._room = Room(self.runner, self.chunk, self.options.prefill_chunk)
        longest = min(self.options.prefill_chunk, max(8, bucket(max_tokens)))
        self._shapes = self.runner.prompt_shapes(longest, self.options.prefill_tokens)
        self._lock = threading.Lock()
        self._running: dict[int, Request] = {}  # lane -> request, oldest first
        self._bases: set[int] = set()  # lanes whose sequences requests continue in copies
        self._cancelled: set[int] = set()  # indices of requests to end early
        self._seeds = np.zeros((num_lanes, 2), np.uint32)  # see `programs.request_keys`
        self._end_tokens = model.generation.eos_token_ids
        self._launched = Launched(self.runner, self._end_tokens)
        self._reading = Reading(self._shapes, takes_turns=False)
        self._arrivals = Arrivals(num_lanes)
        self._compiled: set[Hashable] = set()  # see `compile_first`

    def __reduce__(self) -> Any:
        raise ConfigError(
            "An engine cannot be pickled or copied: it holds a device's memory. Make another from "
            "the model, which each process loads for itself (dms_jax.load)."
        )

    # -- public -----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Completion]:
        """Completes prompts as `dms_jax.generate` does."""
        check_list(prompts)
        sampling = check_call(sampling, on_tokens)
        tokens = encode_prompts(self.model, prompts)
        return self.serve(make_requests(self.model.config, tokens, sampling), sampling, on_tokens)

    def cancel(self, indices: Iterable[int]) -> None:
        """Ends requests of the running call, before its next chunk: call it from `on_tokens`.

        They keep what they have generated, if anything, their finish reason becomes "cancelled",
        and their pages are freed. Requests that wait end too. Each has a last update, and is a
        completion like any other. Indices of requests that have ended, or that are not in the
        call, are ignored.

        Raises:
          ConfigError: there is no sequence of indices, or one is not a whole number.
        """
        if not isinstance(indices, Iterable):
            check("cancel: indices", indices, Sequence[Whole])
        self._cancelled.update(check("cancel: index", index, Whole) for index in indices)

    def warm(self) -> int:
        """Compiles whatever `incoming` requests can need; returns how many programs (BusyError)."""
        with unless_busy(self._lock, "The engine"), self.runner.working():
            num_steps = self._launched.steps_a_program(self.chunk)
            return compile_all(self.runner, self._shapes, num_steps, self._end_tokens)

    @property
    def running(self) -> list[Request]:
        """The requests in lanes, oldest first; after an error, those that it ended."""
        return list(self._running.values())

    # -- the loop ---------------------------------------------------------------------------------

    def serve(
        self,
        requests: list[Request],
        sampling: Sampling,
        on_tokens: OnTokens | None = None,
        *,
        keep: bool = False,
        streaming: bool = True,
        late: bool = False,
        incoming: Incoming | None = None,
        on_told: Callable[[], None] | None = None,
    ) -> list[Completion]:
        """Runs requests to their end; with `keep` they stay in the cache (for a conversation).

        Without `streaming` the updates have no text, which is made once, when a request has ended.
        With `incoming` (see `arrivals`) more requests come meanwhile, each with its own sampling
        and an index that is free; `on_tokens` tells of them, and they were not checked for room.
        Then, or if it may be `late`, `on_tokens` is called while the next programs run, and what it
        cancels ends after these. `on_told` is called behind the calls of `on_tokens` for a chunk.

        Any exception that stops it, an interrupt included, leaves the engine usable and has the
        completions of the requests that had ended: `error.finished` is {index: Completion}.

        Raises:
          BusyError: it is serving another call, in another thread or further up the stack.
          CapacityError: a request does not fit; see `check_room` for what is refused at the start.
          ConfigError: there are stop strings but no tokenizer.
        """
        compilation.check_process()
        check_stop(self.model, sampling)
        done = keep_finished(lambda: finished(requests, sampling))
        with done, unless_busy(self._lock, "The engine"), compilation.reported("Generation"):
            self.check_room(requests, sampling)
            self._arrivals = Arrivals(len(self._seeds), incoming)
            self._run(requests, sampling, on_tokens, on_told, keep, streaming, late)
            completions = [completion_of(each, logprobs=sampling.logprobs) for each in requests]
        return completions

    def check_room(self, requests: list[Request], sampling: Sampling) -> None:
        """Refuses requests that are known not to fit, before any of them runs.

        Raises:
          CapacityError: a request can never fit, whatever the model generates; see `Room.check`.
        """
        self.runner.recover()
        self.runner.raise_max_length(max((request.max_length for request in requests), default=1))
        self._room.check(requests, endless=not (self._end_tokens or sampling.stop_strings))

    def _run(
        self,
        requests: list[Request],
        sampling: Sampling,
        on_tokens: OnTokens | None,
        on_told: Callable[[], None] | None,
        keep: bool,
        streaming: bool,
        late: bool,
    ) -> None:
        streaming, end_tokens = streaming and on_tokens is not None, self._end_tokens
        tracker = TextTracker(self.model.tokenizer, end_tokens, streaming=streaming)
        self._cancelled.clear()
        self._launched = Launched(self.runner, end_tokens)
        joined = self._arrivals.incoming is not None
        # A policy that cuts dense prompts has page tables of the cut rows in its steps.
        takes_turns = joined and not self.policy.shrinks
        self._reading = Reading(self._shapes, takes_turns=takes_turns)
        reporter = Reporter(
            self.runner, tracker, on_tokens, keep, self._reading, self._cancelled, on_told
        )
        # Stop strings are found between chunks; a conversation must not cache tokens after one.
        by_step = keep and bool(sampling.stop_strings)
        num_steps = 1 if by_step else self.chunk
        # Then the host looks at each chunk before the next, and at first tokens, as a listener may.
        awaited = joined or by_step or (on_tokens is not None and not late)
        waiting, self._running = collections.deque(requests), {}
        self._bases = {request.base for request in requests if request.base is not None}
        a_program = self._launched.steps_a_program(num_steps)
        compiled = (sampling.filter, a_program, end_tokens, self._compiled)
        try:
            with self.runner.working():
                if requests and not any(request.seen or request.before for request in requests):
                    self.runner.expect(max(len(each.prompt) for each in requests) + num_steps)
                    compile_first(self.runner, self._shapes, requests, *compiled)
                while self._arrivals.receive(self._launched, waiting, self._running, reporter.tell):
                    if self._cancelled:  # meanwhile: their lanes are free, and none is for them
                        self._catch_up(waiting, reporter)
                        self._report(reporter, waiting)
                    if takes_turns or not self._reading.parts:
                        self._admit(waiting)
                    if self._reading.parts:
                        self._read(waiting, sampling, reporter)
                        if self._reading.parts and not takes_turns:
                            reporter.tell()
                            continue
                    drawn = self._launched.drawn
                    if awaited and drawn and not self._arrivals.defers(self._running, drawn):
                        self._report(reporter, waiting)
                    if self._decoding():
                        self._decode(waiting, sampling, num_steps, reporter, awaited=awaited)
                    else:
                        reporter.tell()
        finally:
            reporter.tell()

    def _decoding(self) -> dict[int, Request]:
        """Returns the requests whose prompts are in the cache, by lane."""
        reading = self._reading.parts
        return {lane: each for lane, each in self._running.items() if lane not in reading}

    def _report(self, reporter: Reporter, waiting: collections.deque[Request]) -> None:
        """Reads what prompts gave, and reports it with what was cancelled."""
        self._launched.read()
        reporter.report(self._running, waiting)

    def _admit(self, waiting: collections.deque[Request]) -> None:
        """Moves waiting requests into free lanes, where they read their prompts."""
        if not waiting or len(self._running) == len(self._seeds):
            return
        started, continued = self._room.admit(waiting, self._running, self._reading, self._bases)
        if not started:
            return
        self._seeds = self._seeds.copy()  # a program may still read the old
        self._seeds[list(started)] = [(each.seed, each.copy) for each in started.values()]
        self.runner.set_max_lengths({lane: each.max_length for lane, each in started.items()})
        if continued:
            sharing.fork(self.runner, continued)

    def _read(
        self, waiting: collections.deque[Request], sampling: Sampling, reporter: Reporter
    ) -> None:
        """Launches the next tokens of prompts, and the draws after those that are complete."""
        runner = self.runner
        while batch := self._reading.next_batch():
            extra = np.zeros(len(runner.seen), np.int64)
            for lane, tokens in batch.tokens.items():
                extra[lane] = len(tokens)
            if not self._reserve_or_preempt(extra, waiting, reporter, prompt=batch.prompt):
                continue  # with those that are left, before others come
            extended = runner.extend(
                batch.tokens,
                shape=batch.shape,
                prompt=batch.prompt,
                ends_prompt=batch.ends_prompt,
            )
            self._reading.advance(batch)
            record_peak_bytes(runner, self._running)
            runner.trim()
            self._launched.prompts(extended, {lane: self._running[lane] for lane in batch.tokens})
            break
        if self._reading.copied:  # answers that ended may make room
            self._catch_up(waiting, reporter)
        if not (source_of := self._reading.take_complete()):
            return
        rule = self._arrivals.filter(sampling, self._running)
        self._launched.draw_first(source_of, self._running, self._seeds, rule)
        if shared := {lane: source for lane, source in source_of.items() if lane != source}:
            extra = self._room.extra(self._running, self._reading.parts)  # waits for lengths
            without = self._room.fork(shared, self._running, extra)
            waiting.extendleft(self._running.pop(lane) for lane in without)

    def _catch_up(self, waiting: collections.deque[Request], reporter: Reporter) -> None:
        """Reads the steps that run on, whatever was launched behind them."""
        if not self._launched.chunks:
            return
        self._launched.read_steps()
        reporter.tell()
        cancels = bool(self._cancelled)  # what another thread adds now ends later
        if cancels:  # perhaps in the middle of a prompt, of which what was read counts
            self._launched.read()
        reporter.settle(self._running, waiting, cancels=cancels)

    def _reserve_or_preempt(
        self,
        extra: np.ndarray,
        waiting: collections.deque[Request],
        reporter: Reporter,
        *,
        prompt: bool,
    ) -> bool:
        """Reserves pages, preempting the youngest until they fit; False if any left its lane."""
        before = len(self._running)
        while not self.runner.fits(extra, prompt=prompt):
            # Those that their steps or a first token ended make room themselves.
            if self._launched.drawn or self._launched.chunks:
                self._launched.read()
                self._catch_up(waiting, reporter)
                reporter.settle(self._running, waiting)
                extra[[lane for lane in range(len(extra)) if lane not in self._running]] = 0
                continue
            self._launched.read()
            extra[self._room.put_back(self._running, waiting)] = 0
        self._reading.keep(self._running)
        self.runner.reserve(extra, prompt=prompt)
        return len(self._running) == before

    def _decode(
        self,
        waiting: collections.deque[Request],
        sampling: Sampling,
        num_steps: int,
        reporter: Reporter,
        *,
        awaited: bool,
    ) -> None:
        """Runs a chunk of steps, and those that are launched before the one before them is read.

        While others wait the last program of the chunk may still run at the end.
        """
        launched = self._launched
        extra = np.minimum(launched.remaining(self._decoding()), num_steps)
        if launched.chunks and not self.runner.fits_table(extra):
            self._catch_up(waiting, reporter)
            extra = np.minimum(launched.remaining(self._decoding()), num_steps)
        self._reserve_or_preempt(extra, waiting, reporter, prompt=False)
        chunk = (self._seeds, self._arrivals.filter(sampling, self._running), num_steps)
        joined = self._arrivals.incoming is not None
        running_on = len(launched.chunks)  # programs of the chunk before
        launched.decode(self._decoding(), *chunk)
        reporter.tell()  # of the chunk before
        news = joined and bool(launched.drawn or running_on)  # which no later steps hold back
        launched.read()  # prompts, while the steps run
        for _ in range(running_on):
            launched.read_chunk()
        self.runner.trim()
        record_peak_bytes(self.runner, self._running)
        if news:
            self._report(reporter, waiting)
        while True:
            unread = len(launched.chunks)
            undisturbed = not (awaited or waiting or self._cancelled)
            ahead = undisturbed and launched.reserve_ahead(self._running, num_steps)
            if ahead:
                launched.decode(self._running, *chunk)
            behind = len(launched.chunks) - unread  # programs that run on
            admits = joined or bool(waiting and not awaited)
            if admits and launched.may_run_on(self._decoding()):
                behind = max(behind, 1)
            reporter.tell()  # of the last one that was read
            while len(launched.chunks) > behind:
                launched.read_chunk()
            if joined or not awaited:
                reporter.settle(self._running, waiting)
            else:
                self._report(reporter, waiting)
            if not ahead:
                return
            record_peak_bytes(self.runner, self._running)  # without what is not needed after all
