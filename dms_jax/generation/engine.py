"""The scheduler: which sequences are in the cache, and what runs next.

A request waits, is admitted to a lane when the pool can hold the first chunk of its prompt, is
prefilled in chunks, and decodes in chunks until it ends. Of equal prompts that are admitted
together one is prefilled, and copied to the lanes of the others as far as the pool holds them.

The pages that a chunk may need are reserved before it runs. If they do not fit, the youngest
running request is preempted: it returns to the queue with its tokens and is recomputed later, the
prompt as a prompt and the answer as an answer, so that every policy decides as it did before.
"""

import collections
import threading
from collections.abc import Hashable, Iterable, Sequence
from typing import Unpack

import jax
import numpy as np

from dms_jax.checks import Whole, check, show_options
from dms_jax.errors import CapacityError, ConfigError
from dms_jax.generation import sharing
from dms_jax.generation.calls import keep_finished, unless_busy
from dms_jax.generation.memory import out_of_memory, pool_pages
from dms_jax.generation.options import EngineKeywords, EngineOptions
from dms_jax.generation.programs import Steps, bucket, request_keys
from dms_jax.generation.prompts import check_call, check_list, encode_prompt
from dms_jax.generation.reporting import Reporter
from dms_jax.generation.requests import (
    Completion,
    OnTokens,
    Prompt,
    Request,
    check_finite,
    completion_of,
    finished,
    make_requests,
)
from dms_jax.generation.room import Room
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Sampling
from dms_jax.generation.text import TextTracker
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
            table_width=self.options.table_width,
            kv_dtype=self.options.kv_dtype,
        )
        self._room = Room(self.runner, self.chunk, self.options.prefill_chunk)
        self._lock = threading.Lock()
        self._running: dict[int, Request] = {}  # lane -> request, oldest first
        self._bases: set[int] = set()  # lanes whose sequences requests continue in copies
        self._cancelled: set[int] = set()  # indices of requests to end early
        self._keys = np.zeros((num_lanes, *request_keys([0], [0]).shape[1:]), np.uint32)
        self._last_tokens = np.zeros(num_lanes, np.int32)

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
        tokens = [
            encode_prompt(self.model, prompt, name=f"Prompt {index}")
            for index, prompt in enumerate(prompts)
        ]
        return self.serve(make_requests(self.model.config, tokens, sampling), sampling, on_tokens)

    def cancel(self, indices: Iterable[int]) -> None:
        """Ends requests of the running call, before its next chunk: call it from `on_tokens`.

        They keep what they have generated, if anything, their finish reason becomes "cancelled",
        and their pages are freed. Requests that wait end too. Each has a last update, and is a
        completion like any other. Indices of requests that have ended, or that are not in the
        call, are ignored.

        Raises:
          ConfigError: an index is not a whole number.
        """
        self._cancelled.update(check("cancel: index", index, Whole) for index in indices)

    # -- the loop ---------------------------------------------------------------------------------

    def serve(
        self,
        requests: list[Request],
        sampling: Sampling,
        on_tokens: OnTokens | None = None,
        *,
        keep: bool = False,
    ) -> list[Completion]:
        """Runs requests to their end; with `keep` they stay in the cache (for a conversation).

        Any exception that stops it, an interrupt included, leaves the engine usable and has the
        completions of the requests that had ended: `error.finished` is {index: Completion}.

        Raises:
          BusyError: it is serving another call, in another thread or further up the stack.
          CapacityError: a request does not fit; see `check_room` for what is refused at the start.
          ConfigError: there are stop strings but no tokenizer.
        """
        if sampling.stop_strings and self.model.tokenizer is None:
            raise ConfigError(
                "Sampling: stop strings are looked for in text, and this model came without a "
                "tokenizer. Leave them out, or end at a token (generation.eos_token_ids)."
            )
        done = keep_finished(lambda: finished(requests, sampling))
        with done, unless_busy(self._lock, "The engine"):
            self.check_room(requests, sampling)
            self._run(requests, sampling, on_tokens, keep=keep)
            completions = [completion_of(each, logprobs=sampling.logprobs) for each in requests]
        return completions

    def check_room(self, requests: list[Request], sampling: Sampling) -> None:
        """Refuses requests that are known not to fit, before any of them runs.

        Raises:
          CapacityError: a request can never fit, whatever the model generates; see `Room.check`.
        """
        self.runner.recover()
        self.runner.raise_max_length(max((request.max_length for request in requests), default=1))
        endless = not (self.model.generation.eos_token_ids or sampling.stop_strings)
        self._room.check(requests, endless=endless)

    def _run(
        self,
        requests: list[Request],
        sampling: Sampling,
        on_tokens: OnTokens | None,
        *,
        keep: bool,
    ) -> None:
        tracker = TextTracker(
            self.model.tokenizer,
            sampling.stop_strings,
            self.model.generation.eos_token_ids,
            streaming=on_tokens is not None,
        )
        self._cancelled.clear()
        reporter = Reporter(self.runner, tracker, on_tokens, keep, self._cancelled)
        # Stop strings are found between chunks; a conversation must not cache tokens after one.
        num_steps = 1 if keep and sampling.stop_strings else self.chunk
        waiting, self._running = collections.deque(requests), {}
        self._bases = {request.base for request in requests if request.base is not None}
        try:
            with self.runner.working():
                while waiting or self._running:
                    self._admit(waiting, sampling)
                    reporter.report(self._running, waiting)
                    if self._running:
                        self._decode_chunk(waiting, sampling, num_steps)
                        reporter.report(self._running, waiting)
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            raise CapacityError(
                "The device ran out of memory while generating. Give the cache less (memory=), or "
                "use fewer lanes or a smaller prefill_chunk."
            ) from error

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
        )
        self._keys[list(started)] = keys
        self.runner.set_max_lengths({lane: each.max_length for lane, each in started.items()})
        if continued:
            sharing.fork(self.runner, continued)
        self._prefill(prompts, waiting, sampling, source_of)
        answers = {lane: tokens for lane, tokens in answers.items() if lane in self._running}
        if answers:
            self._prefill(answers, waiting, sampling, None)
        self._fork(source_of, waiting)
        for lane in started:
            if lane in self._running:
                self._last_tokens[lane] = self._running[lane].generated[-1]

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
        sampling: Sampling,
        source_of: dict[int, int] | None,
    ) -> None:
        """Runs tokens of several lanes through the cache and draws the tokens after prompts.

        Args:
          todo: lane -> its tokens.
          waiting: the queue to which preempted requests return.
          sampling: how tokens are drawn.
          source_of: lane -> the lane that reads its prompt for it; None if these are no prompts.
        """
        runner, prompt = self.runner, source_of is not None
        width = min(self.options.prefill_chunk, max(8, bucket(max(map(len, todo.values())))))
        done = dict.fromkeys(todo, 0)
        while True:
            unfinished = [
                lane
                for lane, start in done.items()
                if start < len(todo[lane]) and lane in self._running  # others were preempted
            ]
            if not unfinished:
                break
            parts = {
                lane: np.asarray(todo[lane][done[lane] : done[lane] + width], np.int32)
                for lane in unfinished[: max(1, self.options.prefill_tokens // width)]
            }
            extra = np.zeros(len(runner.seen), np.int64)
            for lane, part in parts.items():
                extra[lane] = len(part)
            if not self._reserve_or_preempt(extra, waiting, prompt=prompt):
                continue
            ends = [lane for lane in parts if prompt and done[lane] + width >= len(todo[lane])]
            extended = runner.extend(parts, width=width, prompt=prompt, ends_prompt=ends)
            for lane, part in parts.items():
                done[lane] += len(part)
                meter = self._running[lane].meter
                meter.add(extended.live[lane], held=extended.held[lane])
                meter.prefilled += len(part)
            self._record_peak_bytes()
            runner.trim()
            drawing = {lane: lane for lane in ends if not self._running[lane].generated}
            drawing |= {
                lane: source
                for lane, source in (source_of or {}).items()
                if source in ends and lane in self._running and not self._running[lane].generated
            }
            if drawing:
                drawn = sharing.first_tokens(runner, extended, drawing, self._keys, sampling.filter)
                for lane, (token, logprob) in drawn.items():
                    request = self._running[lane]
                    check_finite(request, logprob)
                    request.generated.append(token)
                    request.logprobs.append(logprob)
                    if drawing[lane] != lane:
                        request.meter.fork(self._running[drawing[lane]].meter)

    def _reserve_or_preempt(
        self, extra: np.ndarray, waiting: collections.deque[Request], *, prompt: bool
    ) -> bool:
        """Reserves pages, preempting the youngest requests until they fit; False if any was."""
        before = len(self._running)
        while not self.runner.fits(extra, prompt=prompt):
            youngest = next(reversed(self._running))
            if len(self._running) == 1:
                raise self._room.too_small(self._running[youngest], "the sequence to its end")
            request = self._running.pop(youngest)
            request.slots = self.runner.lengths[:, youngest].copy()
            waiting.appendleft(request)
            self.runner.clear([youngest])
            extra[youngest] = 0
        self.runner.reserve(extra, prompt=prompt)
        return len(self._running) == before

    def _decode_chunk(
        self, waiting: collections.deque[Request], sampling: Sampling, num_steps: int
    ) -> None:
        extra = np.zeros(len(self.runner.seen), np.int64)
        for lane, request in self._running.items():
            extra[lane] = min(num_steps, request.remaining)
        self._reserve_or_preempt(extra, waiting, prompt=False)
        remaining = np.zeros(len(self.runner.seen), np.int32)
        for lane, request in self._running.items():
            remaining[lane] = request.remaining
        self._record_peak_bytes()
        steps = self.runner.decode(
            self._last_tokens,
            remaining,
            self._keys,
            sampling.filter,
            num_steps=num_steps,
            end_tokens=self.model.generation.eos_token_ids,
        )
        self._record_steps(steps)

    def _record_steps(self, steps: Steps) -> None:
        """Adds the steps of a chunk to the running requests; a lane ran the first few of them."""
        counts = steps.ran.sum(0).tolist()
        fields = (steps.tokens, steps.logprobs, steps.live, steps.reads)
        tokens, logprobs, live, reads = (field.T.tolist() for field in fields)
        for lane, request in self._running.items():
            count = counts[lane]
            check_finite(request, steps.logprobs[:count, lane])
            request.generated += tokens[lane][:count]
            request.logprobs += logprobs[lane][:count]
            request.live += live[lane][:count]
            request.reads += reads[lane][:count]
            self._last_tokens[lane] = request.generated[-1]

    def _record_peak_bytes(self) -> None:
        held = self.runner.cache_bytes()
        for lane, request in self._running.items():
            request.meter.peak_bytes = max(request.meter.peak_bytes, held[lane])
