"""`Service`: a thread that runs one engine for requests from any thread.

The thread makes a single call, `Engine.serve`, which polls a queue: requests submitted while others
run join them at the next chunk. Only this thread touches the engine. Other threads see the queue
and the snapshot that the thread takes at every poll.
"""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, Unpack

from dms_jax.checks import Whole, check, require, show_options
from dms_jax.errors import (
    BusyError,
    CapacityError,
    DataError,
    DmsJaxError,
    OutOfMemoryError,
    TooLongError,
)
from dms_jax.generation import Completion, Engine, EngineKeywords, EngineOptions, Sampling, Update
from dms_jax.generation.adapters import GivenAdapter
from dms_jax.generation.adapters import read as read_adapters
from dms_jax.generation.engine import Source
from dms_jax.generation.prefixes import PrefixCounts
from dms_jax.generation.requests import (
    NotNumbersError,
    Request,
    completion_of,
    make_requests,
)
from dms_jax.model.adapters import AdapterWeights
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy

_SHORTEN = "Shorten the prompt, or ask for a shorter answer."
_ENDING = "The server is about to end and accepts no more requests."
_FAILED = "The server's engine has failed, and the server ends. Its log says more."

_logger = logging.getLogger("dms_jax")


class DrainingError(BusyError):
    """The service admits no more requests, because it is about to end."""


class DroppedError(DrainingError):
    """A request was cancelled before the engine had it."""


class QueueFullError(BusyError):
    """The most requests run or wait already."""


class Delta(NamedTuple):
    """The new part of one answer since its last delta.

    Attributes:
      choice: index of its prompt among those submitted together.
      text: new text.
      tokens: new token ids.
      logprobs: the log-probability of each of them; empty unless asked for.
      completion: the whole answer, in the last delta; None before.
    """

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    completion: Completion | None = None


Listener = Callable[[Delta | Exception], None]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """The state of a service between two chunks.

    Attributes:
      running: requests in lanes.
      waiting: requests that wait for a lane.
      live_tokens: live cache entries of running requests, averaged over layers and KV heads.
      pages_in_use, pages_free: pages of the pool; pages used only by cached prefixes are free.
      prefixes: the cached prefixes.
      draining: whether no more requests are admitted.
      alive: whether the engine's thread runs.
    """

    running: int = 0
    waiting: int = 0
    live_tokens: float = 0.0
    pages_in_use: int = 0
    pages_free: int = 0
    prefixes: PrefixCounts = dataclasses.field(default=PrefixCounts())
    draining: bool = False
    alive: bool = False


@dataclasses.dataclass(frozen=True)
class _Job:
    """A request with its listener, and the index of its choice."""

    request: Request
    listener: Listener
    choice: int


@dataclasses.dataclass(frozen=True)
class _Change:
    """The replacement of an adapter, and a future that is set when it is done."""

    adapter: AdapterWeights
    done: concurrent.futures.Future[None]


def notify(listener: Callable[..., None], *arguments: Delta | Exception) -> None:
    """Calls a listener and logs its exceptions, which must not end the answers of others."""
    try:
        listener(*arguments)
    except Exception:
        _logger.exception("A listener failed.")


def _describe(request: Request) -> str:
    """Describes a request in terms of what its client asked for."""
    tokens = len(request.prompt)
    return f"The prompt of {tokens:,} tokens with its answer of up to {request.max_new_tokens:,}"


def _do_nothing() -> None:
    pass


class Service:
    """Runs an engine in its own thread, for requests from any thread.

    Args:
      model: the model to run.
      policy, adapters: see `Engine`.
      num_lanes, max_tokens, memory, chunk, **options: see `EngineOptions`. Here `max_tokens` is
        also the most tokens, prompt and answer, that a request may ask for.
      max_waiting: the most requests that may wait for a lane; more are refused.

    Attributes:
      engine: the engine; only its thread may use it.
      max_tokens: the most tokens of a request, prompt and answer.
      max_requests: the most requests that can run or wait.
      draining: whether no more requests are admitted.
      failure: the exception that ended the thread; None if none has.
      on_failure: called in the thread after `failure` is set.
      after_chunk: called in the thread after listeners were called, once for all of a chunk.
    """

    @show_options(EngineOptions)
    def __init__(
        self,
        model: LanguageModel,
        policy: Policy | str | None = None,
        *,
        adapters: Mapping[str, GivenAdapter] | None = None,
        num_lanes: int = 8,
        max_tokens: int | None = None,
        memory: float | int | None = None,
        chunk: int = 8,
        max_waiting: int = 256,
        **options: Unpack[EngineKeywords],
    ):
        limits = EngineOptions(num_lanes, max_tokens, memory, chunk, **options)
        self.max_requests = limits.num_lanes + check("max_waiting", max_waiting, Whole)
        positions = model.config.max_position_embeddings
        self.max_tokens = limits.max_tokens or positions
        require(
            self.max_tokens <= positions,
            f"Service: max_tokens must be at most the model's {positions:,} positions, got "
            f"{self.max_tokens:,}.",
        )
        require(
            self.max_tokens > 1,
            "Service: max_tokens must be at least 2, one of a prompt and one of its answer, got "
            f"{self.max_tokens}.",
        )
        self.engine = Engine(model, policy, adapters=adapters, **dataclasses.asdict(limits))
        runner = self.engine.runner
        # Fixes the widths of page tables for all later requests, so that nothing recompiles.
        runner.reservation.allow_length(self.max_tokens)
        self._admission = self.engine.admission
        self._slots = self._admission.slots_alone(self.max_tokens + self.engine.chunk)
        self._pages = runner.reservation.allocator.pages_per_shard * runner.num_shards
        self._jobs: dict[int, _Job] = {}  # unfinished requests by index, oldest first
        self._queue: collections.deque[Request] = collections.deque()  # not polled yet
        self._to_cancel: set[int] = set()  # indices that the engine does not have yet
        self._changes: dict[str, _Change] = {}  # pending replacements of adapters, by name
        # Notified when the queue, `_to_cancel`, `_changes` or `draining` change.
        self._changed = threading.Condition()
        self._indices = itertools.count()
        self._snapshot = Snapshot(pages_free=self._pages)
        self.draining = False
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = _do_nothing
        self.after_chunk: Callable[[], None] = _do_nothing
        self._thread = threading.Thread(target=self._run, name="dms_jax engine", daemon=True)

    # -- from any thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        listener: Listener,
        *,
        adapter: str | None = None,
        priority: int = 0,
    ) -> list[int]:
        """Queues requests, which join the running ones; returns their indices.

        Equal prompts of a submission are prefilled once and draw differently, as in `generate`.

        Args:
          prompts: token ids of each.
          sampling: how all of them are sampled.
          listener: called in the engine's thread with each `Delta`, or once with the error that
            ended a request.
          adapter: name of their adapter; None for the plain model.
          priority: see `Request.priority`; lower numbers come first.

        Raises:
          DrainingError: no more requests are admitted.
          QueueFullError: too many requests run or wait.
          ConfigError: there are stop strings but no tokenizer, a grammar is not supported, or the
            adapter is unknown.
          TooLongError: a prompt and its answer are longer than `max_tokens`.
          CapacityError: a request is known not to fit into the pool, even alone.
        """
        self.engine.check_adapter(adapter)
        for prompt in prompts:
            self._check_length(len(prompt), sampling.max_new_tokens)
        if len(prompts) > self.max_requests:
            raise DataError(
                f"{len(prompts)} answers are requested at once, and at most {self.max_requests} "
                "can run or wait here. Ask for fewer."
            )
        adapters = [adapter] * len(prompts)
        config = self.engine.model.config
        requests = make_requests(config, prompts, sampling, adapters=adapters, priority=priority)
        for request in requests:
            self._check_fits(request)
        self._check_admits(requests)  # a full queue compiles no grammars
        self.engine.check_requests(requests)
        with self._changed:
            self._check_admits(requests)
            for choice, request in enumerate(requests):
                request.index = next(self._indices)
                self._jobs[request.index] = _Job(request, listener, choice)
            self._queue.extend(requests)
            self._changed.notify()
        return [request.index for request in requests]

    def cancel(self, indices: Iterable[int]) -> None:
        """Cancels requests before the next chunk and frees their pages; ignores ended ones."""
        with self._changed:
            self._to_cancel.update(index for index in indices if index in self._jobs)
            self._changed.notify()

    def replace_adapter(self, name: str, adapter: GivenAdapter) -> None:
        """Replaces an adapter, and waits until that is done.

        Its running requests finish with the old adapter; later ones wait for the new one. No other
        request waits, and nothing is compiled.

        Args:
          name: name of the adapter.
          adapter: the new adapter, see `Engine.update`; the calling thread reads it.

        Raises:
          DrainingError: the service is about to end.
          BusyError: the adapter is being replaced already.
          ConfigError, CheckpointError: the new adapter does not fit; see `Engine.update`. The old
            one stays.
        """
        self.engine.check_adapter(name)
        (read,) = read_adapters(self.engine.model, {name: adapter}).values()
        done: concurrent.futures.Future[None] = concurrent.futures.Future()
        with self._changed:
            if self.draining:
                raise DrainingError(_ENDING)
            if name in self._changes:
                raise BusyError(f"Adapter {name!r} is being replaced already. Try again later.")
            self._changes[name] = _Change(read, done)
            self._changed.notify()
        done.result()

    def close(self) -> None:
        """Admits no more requests; the thread ends after the admitted ones."""
        with self._changed:
            self.draining = True
            self._changed.notify()

    def drain(self, seconds: float) -> bool:
        """Closes the service and waits until all requests have ended.

        Args:
          seconds: timeout, after which running requests are cancelled.

        Returns:
          Whether all of them ended by themselves.
        """
        self.close()
        if self._thread.ident is None:  # it never started
            return True
        self._thread.join(seconds)
        in_time = not self._thread.is_alive()
        self.cancel(list(self._jobs))
        self._thread.join()
        return in_time

    def snapshot(self) -> Snapshot:
        """Returns the state of the service at the last poll."""
        snapshot = self._snapshot
        jobs = list(self._jobs.values())
        unfinished = sum(job.request.finish_reason is None for job in jobs)
        return dataclasses.replace(
            snapshot,
            waiting=max(unfinished - snapshot.running, 0),
            draining=self.draining,
            alive=self._thread.is_alive(),
        )

    def warm(self) -> int:
        """Compiles all programs that requests can need.

        Call it before `start`. Without it, programs are compiled when they are first needed.

        Returns:
          The number of programs.

        Raises:
          BusyError: the thread runs.
        """
        return self.engine.warm()

    def smoke_test(self) -> None:
        """Completes a short prompt like any request.

        Raises:
          DmsJaxError: the model does not run.
        """
        done: concurrent.futures.Future[None] = concurrent.futures.Future()

        def listen(delta: Delta | Exception) -> None:
            if isinstance(delta, Exception):
                done.set_exception(delta)
            elif delta.completion is not None:
                done.set_result(None)

        sampling = Sampling(max_new_tokens=min(2, self.max_tokens - 1))
        self.submit([[0]], sampling, listen, adapter=self.engine.adapters[0])
        done.result()

    # -- admission --------------------------------------------------------------------------------

    def _check_admits(self, requests: Sequence[Request]) -> None:
        if self.failure is not None:
            raise DrainingError(_FAILED)
        if self.draining:
            raise DrainingError(_ENDING)
        if len(self._jobs) + len(requests) > self.max_requests:
            raise QueueFullError(
                f"{len(self._jobs)} requests run or wait already, of at most "
                f"{self.max_requests}. Try again later."
            )

    def _check_length(self, prompt: int, answer: int) -> None:
        if prompt + answer > self.max_tokens:
            raise TooLongError(
                f"The prompt has {prompt:,} tokens and its answer up to {answer:,}; "
                f"a sequence may have {self.max_tokens:,} here. {_SHORTEN}"
            )

    def _check_fits(self, request: Request) -> None:
        slots = self._admission.least_slots(request)
        if slots > self._slots:
            raise CapacityError(
                f"{_describe(request)} needs room for at least {slots:,} tokens in the cache; a "
                f"sequence has room for {self._slots:,} here. {_SHORTEN}"
            )

    # -- in the engine's thread -------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not (self.draining and not self._jobs):
                try:
                    self._serve()
                except Exception as error:
                    self._recover(error)
            self._take_snapshot()
            self._refuse_changes(DrainingError(_ENDING))
        except BaseException as error:  # else clients would wait forever
            self._fail_all(error)

    def _serve(self) -> None:
        """Runs one engine call, until the service is drained or a chunk fails."""
        source = Source(
            incoming=self._poll,
            on_tokens=self._notify,
            on_notified=lambda: notify(self.after_chunk),
        )
        self.engine.serve(source)

    def _poll(self, wait: bool) -> list[Request] | None:
        """Hands queued requests and cancellations to the engine, between two chunks.

        Args:
          wait: whether to block until there is something to do, because nothing runs.

        Returns:
          The requests that were queued; None when no more will come.
        """
        self._take_snapshot()
        with self._changed:
            while wait and not (self._queue or self._to_cancel or self._changes or self.draining):
                self._changed.wait()
            cancelled, self._to_cancel = self._to_cancel, set()
            dropped = [request for request in self._queue if request.index in cancelled]
            queued = [request for request in self._queue if request.index not in cancelled]
            self._replace_adapters(queued)
            admitted = [each for each in queued if not self._waits_for_adapter(each)]
            self._queue = collections.deque(filter(self._waits_for_adapter, queued))
            last = self.draining and not (admitted or self._queue)
        self.engine.cancel(cancelled)
        for request in dropped:
            self._fail(request, DroppedError("The request was cancelled."))
        return None if last else admitted

    def _waits_for_adapter(self, request: Request) -> bool:
        """Whether a request must not begin before its adapter is replaced."""
        return request.adapter in self._changes and not request.generated

    def _replace_adapters(self, queued: Sequence[Request]) -> None:
        """Replaces adapters that no unfinished request has begun to use."""
        begun = self._jobs.keys() - {each.index for each in queued if not each.generated}
        in_use = {self._jobs[index].request.adapter for index in begun}
        for name in [name for name in self._changes if name not in in_use]:
            change = self._changes.pop(name)
            try:
                self.engine.replace(None, {name: change.adapter})
            except Exception as error:  # raised in the caller's thread
                change.done.set_exception(error)
            else:
                change.done.set_result(None)

    def _take_snapshot(self) -> None:
        running, in_use = self.engine.running, self.engine.runner.reservation.allocator.pages_in_use
        live = sum(each.live for each in running)
        rows = self.engine.model.config.num_layers * self.engine.model.config.num_kv_heads
        self._snapshot = Snapshot(
            running=len(running),
            live_tokens=live / rows,
            pages_in_use=in_use,
            pages_free=self._pages - in_use,
            prefixes=self.engine.runner.prefixes.counts,
        )

    def _notify(self, update: Update) -> None:
        """Notifies the listener of a request of its new tokens."""
        job = self._jobs[update.index]
        request = job.request
        first = len(request.generated) - len(update.tokens)
        delta = Delta(
            choice=job.choice,
            text=update.text,
            tokens=update.tokens,
            logprobs=request.logprobs[first:] if request.sampling.logprobs else [],
            completion=completion_of(request) if update.finished else None,
        )
        if update.finished:
            del self._jobs[update.index]
        failed = request.finish_reason == "grammar"
        notify(job.listener, DataError(request.failure) if failed else delta)

    # -- failures, in the engine's thread ---------------------------------------------------------

    def _recover(self, error: Exception) -> None:
        """Ends the requests that an error stopped, and queues the others again.

        Preempted requests continue their answers. So do requests that ran beside one whose logits
        are not numbers; they are recomputed, as the cache may be damaged. A request that does not
        fit even alone was the only running one, or the first in the queue.
        """
        _logger.warning("A chunk failed: %s", error, exc_info=not isinstance(error, DmsJaxError))
        with self._changed:
            requests = [job.request for job in self._jobs.values()]
            queued = {request.index for request in self._queue}
            ran = {request.index for request in self.engine.running}
            if isinstance(error, NotNumbersError):
                ran = error.indices  # including chains that have left their lane since
            stopped = [each for each in requests if each.index in ran]
            stopped = stopped or sorted(requests, key=lambda each: each.index in queued)[:1]
            failed = {request.index for request in stopped}
            self._queue = collections.deque(each for each in requests if each.index not in failed)
            self._to_cancel |= self.engine.cancelled - failed  # which the next call does not know
        for request in stopped:
            self._fail(request, error)
        if not stopped:  # the engine itself cannot start
            time.sleep(1.0)

    def _fail(self, request: Request, error: Exception) -> None:
        """Ends a request with an error."""
        if isinstance(error, CapacityError) and not isinstance(error, OutOfMemoryError):
            # The engine's message names indices and options that mean nothing to a client.
            tokens = len(request.prompt) + len(request.generated)
            error = CapacityError(
                f"{_describe(request)} does not fit into the cache here, even alone: it was full "
                f"at token {tokens:,} of these. {_SHORTEN}"
            )
        notify(self._jobs.pop(request.index).listener, error)
        notify(self.after_chunk)

    def _refuse_changes(self, error: Exception) -> None:
        """Fails the pending replacements of adapters."""
        with self._changed:
            changes, self._changes = self._changes, {}
        for change in changes.values():
            change.done.set_exception(error)

    def _fail_all(self, error: BaseException) -> None:
        """Fails every request because the thread ends, and admits no more."""
        _logger.critical("The engine has failed, and the server ends.", exc_info=error)
        with self._changed:
            self.failure, self.draining = error, True
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._queue.clear()
        self._refuse_changes(DrainingError(_FAILED))
        told = [functools.partial(job.listener, DrainingError(_FAILED)) for job in jobs]
        for call in (*told, self.after_chunk):
            try:
                call()
            except BaseException:  # perhaps the same error again; still notify the others
                _logger.exception("A listener failed.")
        self.on_failure()
