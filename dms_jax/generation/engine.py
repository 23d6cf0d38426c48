"""The scheduler: which sequences are in the cache, and what runs next.

A request waits, is admitted to a lane when the pool can hold what its prompt takes at least, is
prefilled in chunks, and decodes in chunks until it ends. Of equal prompts that are admitted
together one is prefilled, and copied to the lanes of the others as far as the pool holds them.

The pages that a chunk may need are reserved before it runs. If they do not fit, the youngest
running request is preempted: it returns to the queue with its tokens and is recomputed later, the
prompt as a prompt and the answer as an answer, so that every policy decides as it did before.

Programs are launched before the results of those before them are read, as far as nobody waits for
these: prompts, the first tokens after them, and chunks of steps. While requests wait for a lane, a
chunk is read before the next one is launched: a lane that ended would be idle in it.
"""

import collections
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Unpack

import numpy as np

from dms_jax import compilation
from dms_jax.checks import Whole, check, show_options
from dms_jax.generation import sharing
from dms_jax.generation.arrivals import Arrivals, Incoming
from dms_jax.generation.calls import keep_finished, unless_busy
from dms_jax.generation.launched import Launched
from dms_jax.generation.memory import fits_device, pool_pages
from dms_jax.generation.options import EngineKeywords, EngineOptions
from dms_jax.generation.programs import bucket, request_keys
from dms_jax.generation.prompts import check_call, check_list, check_stop, encode_prompts
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
from dms_jax.generation.warming import compile_first
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
        policy: Policy | None = None,
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
        self._keys = np.zeros_like(request_keys([0] * num_lanes, [0] * num_lanes))
        self._end_tokens = model.generation.eos_token_ids
        self._launched = Launched(self.runner, self._end_tokens)
        self._arrivals = Arrivals()
        self._compiled: set[Hashable] = set()  # see `compile_first`

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
        incoming: Incoming | None = None,
    ) -> list[Completion]:
        """Runs requests to their end; with `keep` they stay in the cache (for a conversation).

        Without `streaming` the updates have no text, which is made once, when a request has ended.
        With `incoming` (see `arrivals`) more requests come meanwhile, each with its own sampling
        and an index that is free; `on_tokens` tells of them, and they were not checked for room.

        Any exception that stops it, an interrupt included, leaves the engine usable and has the
        completions of the requests that had ended: `error.finished` is {index: Completion}.

        Raises:
          BusyError: it is serving another call, in another thread or further up the stack.
          CapacityError: a request does not fit; see `check_room` for what is refused at the start.
          ConfigError: there are stop strings but no tokenizer.
        """
        check_stop(self.model, sampling)
        done = keep_finished(lambda: finished(requests, sampling))
        with done, unless_busy(self._lock, "The engine"), compilation.reported("Generation"):
            self.check_room(requests, sampling)
            self._arrivals = Arrivals(incoming)
            self._run(requests, sampling, on_tokens, keep=keep, streaming=streaming)
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
        *,
        keep: bool,
        streaming: bool,
    ) -> None:
        streaming, end_tokens = streaming and on_tokens is not None, self._end_tokens
        tracker = TextTracker(self.model.tokenizer, end_tokens, streaming=streaming)
        self._cancelled.clear()
        self._launched = Launched(self.runner, end_tokens)
        reporter = Reporter(self.runner, tracker, on_tokens, keep, self._cancelled)
        # Updates and stop strings are looked at before the next chunk, and so are first tokens.
        awaited = on_tokens is not None or bool(sampling.stop_strings)
        # Stop strings are found between chunks; a conversation must not cache tokens after one.
        num_steps = 1 if keep and sampling.stop_strings else self.chunk
        waiting, self._running = collections.deque(requests), {}
        self._bases = {request.base for request in requests if request.base is not None}
        room = fits_device(
            "The device ran out of memory while generating. Give the cache less (memory=), or use "
            "fewer lanes or a smaller prefill_chunk."
        )
        compiled = (sampling.filter, num_steps, end_tokens, self._compiled)
        try:
            with room, self.runner.working():
                if requests and not any(request.seen or request.before for request in requests):
                    compile_first(self.runner, self._shapes, requests, *compiled)
                while self._arrivals.receive(self.runner, waiting, self._running):
                    if self._cancelled:  # meanwhile: their lanes are free, and none is for them
                        reporter.report(self._running, waiting)
                    self._admit(waiting, sampling)
                    if awaited or self._cancelled:
                        self._launched.read()
                        reporter.report(self._running, waiting)
                    if self._running:
                        self._decode(waiting, sampling, num_steps, reporter, awaited=awaited)
        finally:
            tracker.finish()

    def _admit(self, waiting: collections.deque[Request], sampling: Sampling) -> None:
        """Moves waiting requests into free lanes and prefills them."""
        extra = np.zeros(self.runner.lengths.shape, np.int64)
        for lane, request in self._running.items():
            extra[:, lane] = min(self.chunk, request.remaining)
        prompts: dict[int, list[int]] = {}
        answers: dict[int, list[int]] = {}
        readers: dict[Hashable, int] = {}  # the lane that reads a prompt
        source_of: dict[int, int] = {}  # lane -> the lane that reads its prompt for it
        continued: dict[int, int] = {}  # lane -> the lane whose sequence its prompt continues
        taken = self._running.keys() | self._bases
        placed = self._room.place_all(waiting, taken, extra)
        while waiting:
            request = waiting[0]
            lane = placed.popleft() if placed else self._room.place(request, taken, extra)
            if lane is None:
                if not self._running:
                    raise self._room.too_small(request, "the first chunk")
                break
            self._running[lane] = waiting.popleft()
            taken.add(lane)
            shared = sharing.prompt_of(self.runner, request, lane)
            if shared is not None and readers.setdefault(shared, lane) != lane:
                source_of[lane] = readers[shared]
                continue
            if request.base is not None:
                continued[lane] = request.base
            # A preempted request recomputes its answer as an answer, if the policy distinguishes
            # it from a prompt. Its last token has never been in the cache.
            past = request.generated[:-1]
            prompts[lane] = request.before + request.prompt
            if self.policy.parallel != "prompts":
                prompts[lane] += past
            elif past:
                answers[lane] = past
        if not prompts:
            return
        started = {lane: self._running[lane] for lane in (*prompts, *source_of)}
        keys = request_keys(
            [request.seed for request in started.values()],
            [request.copy for request in started.values()],
            len(self._keys),
        )
        self._keys[list(started)] = keys
        self.runner.set_max_lengths({lane: each.max_length for lane, each in started.items()})
        if continued:
            sharing.fork(self.runner, continued)
        unread = self._prefill(prompts, waiting, source_of, prompt=True)
        for lane in [each for each in answers if each not in self._running or each in unread]:
            del answers[lane]
        unread |= self._prefill(answers, waiting, source_of, prompt=False)
        source_of = {lane: each for lane, each in source_of.items() if lane not in unread}
        lanes = [lane for lane in started if lane in self._running and lane not in unread]
        read_in = {lane: source_of.get(lane, lane) for lane in lanes}
        rule = self._arrivals.filter(sampling, self._running, len(self._keys))
        self._launched.draw_first(read_in, self._running, self._keys, rule)
        if source_of:  # its lengths are waited for
            self._fork(source_of, waiting)

    def _fork(self, source_of: dict[int, int], waiting: collections.deque[Request]) -> None:
        """Copies prompts to the lanes that share them, as far as they fit beside the next chunk."""
        runner = self.runner
        source_of = {lane: source for lane, source in source_of.items() if lane in self._running}
        extra = np.zeros(runner.lengths.shape, np.int64)
        for lane, request in self._running.items():
            extra[:, lane] = min(self.chunk, request.remaining)
        for lane, source in source_of.items():
            extra[:, lane] += runner.lengths[:, source]
        while source_of and not runner.fits(extra):
            lane, source = source_of.popitem()
            request = self._running.pop(lane)
            request.slots = runner.lengths[:, source].copy()
            waiting.appendleft(request)
            extra[:, lane] = 0
        if source_of:
            sharing.fork(runner, source_of)

    def _prefill(
        self,
        todo: dict[int, list[int]],
        waiting: collections.deque[Request],
        source_of: dict[int, int],
        *,
        prompt: bool,
    ) -> set[int]:
        """Runs tokens of several lanes through the cache.

        Returns the lanes whose requests were cancelled, and that read for no other request.

        Args:
          todo: lane -> its tokens.
          waiting: the queue to which preempted requests return.
          source_of: lane -> the lane that reads its prompt for it.
          prompt: whether the tokens are those of prompts.
        """
        runner, done, ended = self.runner, dict.fromkeys(todo, 0), set[int]()
        while left := {
            lane: len(todo[lane]) - start
            for lane, start in done.items()
            if start < len(todo[lane]) and lane in self._running  # others were preempted
        }:
            if any(done.values()):  # look who came or went, as between two chunks of steps
                self._arrivals.receive(runner, waiting, self._running)
            gone = {lane for lane, each in self._running.items() if each.index in self._cancelled}
            ended = gone - {source_of.get(lane, lane) for lane in self._running.keys() - gone}
            if not (left := {lane: left[lane] for lane in left if lane not in ended}):
                break
            lanes, width, entries = self._shapes.next_batch(left)
            parts = {
                lane: np.asarray(todo[lane][done[lane] : done[lane] + width], np.int32)
                for lane in lanes
            }
            extra = np.zeros(len(runner.seen), np.int64)
            for lane, part in parts.items():
                extra[lane] = len(part)
            if not self._reserve_or_preempt(extra, waiting, prompt=prompt):
                continue
            ends = [lane for lane in parts if prompt and left[lane] <= width]
            extended = runner.extend(
                parts, width=width, entries=entries, prompt=prompt, ends_prompt=ends
            )
            for lane, part in parts.items():
                done[lane] += len(part)
            record_peak_bytes(runner, self._running)
            runner.trim()
            self._launched.prompts(extended, {lane: self._running[lane] for lane in parts})
        return ended

    def _reserve_or_preempt(
        self, extra: np.ndarray, waiting: collections.deque[Request], *, prompt: bool
    ) -> bool:
        """Reserves pages, preempting the youngest requests until they fit; False if any was."""
        before = len(self._running)
        while not self.runner.fits(extra, prompt=prompt):
            if ended := self._launched.ended(self._running):
                extra[ended] = 0
                continue
            youngest = next(reversed(self._running))
            if len(self._running) == 1:
                raise self._room.too_small(self._running[youngest], "the sequence to its end")
            self._launched.read()
            request = self._running.pop(youngest)
            request.slots = self.runner.lengths[:, youngest].copy()
            waiting.appendleft(request)
            self.runner.clear([youngest])
            extra[youngest] = 0
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
        """Runs a chunk of steps, and those that are launched before the one before them is read."""
        extra = np.minimum(self._launched.remaining(self._running), num_steps)
        self._reserve_or_preempt(extra, waiting, prompt=False)
        rule = self._arrivals.filter(sampling, self._running, len(self._keys))
        chunk = (self._running, self._keys, rule, num_steps)
        self._launched.decode(*chunk)
        self._launched.read()  # prompts, while the steps run
        self.runner.trim()
        record_peak_bytes(self.runner, self._running)
        alone = not awaited and self._arrivals.incoming is None
        while True:
            reporter.tracker.finish()
            undisturbed = alone and not (waiting or self._cancelled)
            if undisturbed and self._launched.reserve_ahead(self._running, num_steps):
                self._launched.decode(*chunk)
            if self._launched.chunks:
                self._launched.read_chunk()
            reporter.report(self._running, waiting)
            if not self._launched.chunks:
                return
            record_peak_bytes(self.runner, self._running)  # without what is not needed after all
