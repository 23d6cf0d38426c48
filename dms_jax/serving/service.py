"""A thread that runs one engine for as long as requests come, from any thread.

The engine runs a single call, whose requests come from a queue: what is submitted while others run
joins them at the next chunk. Everything that touches the engine happens in that thread. Others see
the queue, and figures that the thread leaves between two chunks.
"""

import collections
import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Unpack

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
from dms_jax.generation.prompts import check_stop
from dms_jax.generation.requests import (
    NotNumbersError,
    Request,
    completion_of,
    make_requests,
)
from dms_jax.generation.room import Room
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy

_SHORTEN = "Shorten the prompt, or ask for a shorter answer."

_FAILED = "The server's engine has failed, and the server ends. Its log says more."

_logger = logging.getLogger("dms_jax")


class DrainingError(BusyError):
    """The service takes no more requests, because it is about to end."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """News of one request.

    Attributes:
      choice: which of the prompts that were submitted together.
      text: text since the last piece.
      tokens: token ids since the last piece.
      logprobs: the log-probability of each of them; empty unless they are asked for.
      completion: the whole, in the last piece.
    """

    choice: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    completion: Completion | None = None


Listener = Callable[[Piece | Exception], None]


def _nothing() -> None:
    pass


def _what(request: Request) -> str:
    """A request as who asked for it knows it."""
    tokens = len(request.prompt)
    return f"The prompt of {tokens:,} tokens with its answer of up to {request.max_new_tokens:,}"


def call_listener(listener: Callable[..., None], *news: Piece | Exception) -> None:
    """Calls a listener; its own error is logged, and does not end the others' answers."""
    try:
        listener(*news)
    except Exception:  # whatever it does; the others are still to be told
        _logger.exception("A listener failed.")


@dataclasses.dataclass(frozen=True)
class Figures:
    """What an engine holds between two chunks.

    Attributes:
      running: requests in lanes.
      live_tokens: live entries of these, averaged over layers and KV heads.
      pages_in_use, pages_free: pages of the pool.
      chunks: times that the engine looked for requests.
    """

    running: int = 0
    live_tokens: float = 0.0
    pages_in_use: int = 0
    pages_free: int = 0
    chunks: int = 0


@dataclasses.dataclass(frozen=True)
class _Job:
    """A request, whom to tell, whom to tell that all was told, and which choice it is."""

    request: Request
    listener: Listener
    told: Callable[[], None]
    choice: int


class Service:
    """An engine in a thread of its own, which serves requests from any thread together.

    Args:
      model: the model to run.
      policy: the cache policy; None for the one that the checkpoint declares.
      num_lanes, max_tokens, memory, chunk, **options: see `EngineOptions`. Here `max_tokens` is
        also the most tokens, prompt and answer, that a request may ask for.
      max_waiting: requests that may wait for a lane; more are refused.

    Attributes:
      engine: the engine; only the thread may use it.
      max_tokens: the most tokens of a request, prompt and answer.
      most: the most answers that can run or wait.
      draining: whether it takes no more requests.
      failure: what ended the thread before its time; None unless that has happened.
      on_failure: called in the thread then.
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
        chunk: int = 8,
        max_waiting: int = 256,
        **options: Unpack[EngineKeywords],
    ):
        limits = EngineOptions(num_lanes, max_tokens, memory, chunk, **options)
        self.most = limits.num_lanes + check("max_waiting", max_waiting, Whole)
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
        self.engine = Engine(model, policy, **dataclasses.asdict(limits))
        runner = self.engine.runner
        # At once for all that will come: page tables keep their widths, and compile nothing.
        runner.raise_max_length(self.max_tokens)
        self._room = Room(runner, self.engine.chunk, self.engine.options.prefill_chunk)
        self._slots = self._room.slots_alone(self.max_tokens + self.engine.chunk)
        self._pages = runner.allocator.pages_per_shard * runner.num_shards
        self._endless = not model.generation.eos_token_ids
        self._jobs: dict[int, _Job] = {}  # by index, the oldest first
        self._new: collections.deque[Request] = collections.deque()
        self._cancelled: set[int] = set()
        self._cancelling: set[int] = set()  # what the engine was told, until they end
        self._changed = threading.Condition()
        self._numbers = itertools.count()
        self._told: set[Callable[[], None]] = set()  # to be called when a chunk has been told
        self._chunks = 0
        self._figures = Figures(pages_free=self._pages)
        self.draining = False
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] = _nothing
        self._thread = threading.Thread(target=self._work, name="dms_jax engine", daemon=True)

    # -- from any thread --------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def submit(
        self,
        prompts: Sequence[list[int]],
        sampling: Sampling,
        listener: Listener,
        told: Callable[[], None] = _nothing,
    ) -> list[int]:
        """Lets requests join those that run; returns their indices.

        Equal prompts of a submission are read once, and draw differently, as in a call of
        `generate`.

        Args:
          prompts: token ids of each.
          sampling: how all of them are drawn.
          listener: called in the engine's thread with each `Piece`, or once with the error that
            ended a request.
          told: called there after the pieces of a chunk, once for all requests that gave it.

        Raises:
          DrainingError: no more requests are taken.
          BusyError: too many wait.
          ConfigError: there are stop strings but no tokenizer.
          TooLongError: a prompt and its answer are longer than `max_tokens`.
          CapacityError: a request is known not to fit into the pool, even alone.
        """
        check_stop(self.engine.model, sampling)
        for prompt in prompts:
            self._check_length(len(prompt), sampling.max_new_tokens)
        if len(prompts) > self.most:
            raise DataError(
                f"{len(prompts)} answers are asked for at once, and at most {self.most} can run "
                "or wait here. Ask for fewer."
            )
        requests = make_requests(self.engine.model.config, prompts, sampling)
        for request in requests:
            self._check_room(request)
        with self._changed:
            if self.failure is not None:
                raise DrainingError(_FAILED)
            if self.draining:
                raise DrainingError("The server is about to end and takes no more requests.")
            if len(self._jobs) + len(requests) > self.most:
                raise BusyError(
                    f"{len(self._jobs)} requests run or wait already, of at most {self.most}. "
                    "Try again later."
                )
            for choice, request in enumerate(requests):
                request.index = next(self._numbers)
                self._jobs[request.index] = _Job(request, listener, told, choice)
            self._new.extend(requests)
            self._changed.notify()
        return [request.index for request in requests]

    def cancel(self, indices: Iterable[int]) -> None:
        """Ends requests before the next chunk, and frees their pages; those that ended stay so."""
        with self._changed:
            self._cancelled.update(index for index in indices if index in self._jobs)
            self._changed.notify()

    def refuse(self) -> None:
        """Takes no more requests; the thread ends when those that it has have ended."""
        with self._changed:
            self.draining = True
            self._changed.notify()

    def drain(self, seconds: float) -> bool:
        """Takes no more requests and waits until those that it has have ended.

        Args:
          seconds: after so many those that still run are cancelled.

        Returns:
          Whether all of them ended by themselves.
        """
        self.refuse()
        if self._thread.ident is None:  # it never started
            return True
        self._thread.join(seconds)
        in_time = not self._thread.is_alive()
        self.cancel(list(self._jobs))
        self._thread.join()
        return in_time

    @property
    def alive(self) -> bool:
        """Whether the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def figures(self) -> Figures:
        """What the engine held after its last chunk."""
        return self._figures

    @property
    def waiting(self) -> int:
        """Requests that wait for a lane; those that ended and are yet to be told of it do not."""
        left = sum(job.request.finish_reason is None for job in list(self._jobs.values()))
        return max(left - self._figures.running, 0)

    def warm(self) -> int:
        """Compiles whatever requests can need, so that none waits for it.

        It is called before `start`, or not at all: programs are then compiled when they are needed.

        Returns:
          The number of programs.

        Raises:
          BusyError: the thread runs.
        """
        return self.engine.warm()

    def check(self) -> None:
        """Completes a short prompt in the thread, as a request would be.

        Raises:
          DmsJaxError: the model does not run.
        """
        done = threading.Event()
        news: list[Piece | Exception] = []

        def listen(piece: Piece | Exception) -> None:
            news.append(piece)
            if isinstance(piece, Exception) or piece.completion is not None:
                done.set()

        self.submit([[0]], Sampling(max_new_tokens=min(2, self.max_tokens - 1)), listen)
        done.wait()
        if isinstance(news[-1], Exception):
            raise news[-1]

    # -- what fits --------------------------------------------------------------------------------

    def _check_length(self, prompt: int, answer: int) -> None:
        if prompt + answer > self.max_tokens:
            raise TooLongError(
                f"The prompt has {prompt:,} tokens and an answer of up to {answer:,} is asked for; "
                f"a sequence may have {self.max_tokens:,} here. {_SHORTEN}"
            )

    def _check_room(self, request: Request) -> None:
        slots = self._room.least_slots(request, endless=self._endless)
        if slots > self._slots:
            raise CapacityError(
                f"{_what(request)} needs room for at least {slots:,} tokens in the cache; a "
                f"sequence has room for {self._slots:,} here. {_SHORTEN}"
            )

    # -- in the engine's thread -------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._run()
        except BaseException as error:  # whoever waits would wait for ever
            self._give_up(error)

    def _run(self) -> None:
        while not (self.draining and not self._jobs):
            try:
                self.engine.serve(
                    [], Sampling(), self._tell, incoming=self._incoming, on_told=self._deliver
                )
            except Exception as error:
                self._fail(error)
        self._look()

    def _give_up(self, error: BaseException) -> None:
        """Ends every request because the thread ends, and takes no more."""
        _logger.critical("The engine has failed, and the server ends.", exc_info=error)
        with self._changed:
            self.failure, self.draining = error, True
            jobs = list(self._jobs.values())
            self._jobs.clear()
            self._new.clear()
        for job in jobs:
            for listener, news in ((job.listener, (DrainingError(_FAILED),)), (job.told, ())):
                try:
                    listener(*news)
                except BaseException:  # the one that failed, perhaps; the others are still told
                    _logger.exception("A listener failed.")
        self.on_failure()

    def _incoming(self, wait: bool) -> list[Request] | None:
        """See `arrivals.Incoming`."""
        self._look()
        with self._changed:
            while wait and not (self._new or self._cancelled or self.draining):
                self._changed.wait()
            cancelled, self._cancelled = self._cancelled, set()
            came = [request for request in self._new if request.index not in cancelled]
            never = [request for request in self._new if request.index in cancelled]
            self._new.clear()
            last = self.draining and not came
        self.engine.cancel(cancelled)
        for request in never:
            self._end(request, DrainingError("The request was cancelled."))
        self._cancelling = (self._cancelling | cancelled) & self._jobs.keys()
        return None if last else came

    def _look(self) -> None:
        """Leaves figures for other threads."""
        self._chunks += 1
        running, in_use = self.engine.running, self.engine.runner.allocator.pages_in_use
        live = sum(each.live for each in running)
        rows = self.engine.model.config.num_layers * self.engine.model.config.num_kv_heads
        self._figures = Figures(
            len(running), live / rows, in_use, self._pages - in_use, self._chunks
        )

    def _tell(self, update: Update) -> None:
        job = self._jobs[update.index]
        request, asked = job.request, job.request.sampling.logprobs
        since = len(request.generated) - len(update.tokens)
        completion = completion_of(request, logprobs=asked) if update.finished else None
        piece = Piece(
            choice=job.choice,
            text=update.text,
            tokens=update.tokens,
            logprobs=request.logprobs[since:] if asked else [],
            completion=completion,
        )
        if update.finished:
            del self._jobs[update.index]
        self._told.add(job.told)
        call_listener(job.listener, piece)

    def _deliver(self) -> None:
        told, self._told = self._told, set()
        for each in told:
            call_listener(each)

    def _fail(self, error: Exception) -> None:
        """Ends the requests that an error stopped; those that wait go on waiting.

        So do those that were put back with a part of their answer, and so do those that ran beside
        one whose logits are not numbers: they are computed again, since the cache may hold what it
        left. What does not fit even alone was the only one that ran, or the first one that waited.
        """
        _logger.warning("A chunk failed: %s", error, exc_info=not isinstance(error, DmsJaxError))
        with self._changed:
            requests = [job.request for job in self._jobs.values()]
            new = {request.index for request in self._new}
            ran = {request.index for request in self.engine.running}
            if isinstance(error, NotNumbersError):  # also of chains that left their lane meanwhile
                ran = error.indices
            stopped = [each for each in requests if each.index in ran]
            stopped = stopped or sorted(requests, key=lambda each: each.index in new)[:1]
            gone = {request.index for request in stopped}
            self._new = collections.deque(each for each in requests if each.index not in gone)
            self._cancelled |= self._cancelling - gone  # the engine has forgotten them
        for request in stopped:
            self._end(request, error)
        if not stopped:  # the engine itself cannot start
            time.sleep(1.0)

    def _end(self, request: Request, error: Exception) -> None:
        if isinstance(error, CapacityError) and not isinstance(error, OutOfMemoryError):
            # The engine numbers requests and names its options, which mean nothing to who asked.
            seen = len(request.prompt) + len(request.generated)
            error = CapacityError(
                f"{_what(request)} does not fit into the cache here, even alone: it was full at "
                f"token {seen:,} of these. {_SHORTEN}"
            )
        job = self._jobs.pop(request.index)
        call_listener(job.listener, error)
        call_listener(job.told)
