"""The engine: one loop that admits, prefills, decodes, collects and notifies.

    while call.step(): ...       accept, admit, launch, collect, finish, notify

A `Source` gives requests and receives their updates; `scheduler` holds the state of each request.
The device runs ahead of the host:

    device  | steps  steps  steps  steps | prompts | first tokens | steps ...
    host                             | ends, admissions, launches of these | collects the last, ...

Programs are prefill batches, first tokens, and chunks of decode steps; a long chunk is several
programs. How many programs of a chunk stay in flight at the end of a turn, to be collected after
the next launch:

    a listener may cancel before the next chunk             none
    fewer than `LANES_AHEAD` lanes, which may all end       none
    requests wait for a lane, or may come at any time       the last one: lanes that ended in the
                                                            earlier ones are given away meanwhile
    otherwise                                               all of them

Where prefill and decoding alternate, prompts stay in flight too: the next part of a prompt and the
next steps are launched while the device still runs the last ones.

The updates of a chunk are sent after the next launch, unless a listener may cancel. A request that
shares a prefix with one in prefill waits for that, and continues from there (`prefixes`); so do
equal prompts if they are long. Short ones that are admitted together are prefilled once, and their
sequence is copied to the other lanes; a request whose copy does not fit into the pool returns to
the queue.
"""

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, TypedDict, Unpack

import numpy as np
from flax import nnx

from dms_jax import compilation
from dms_jax.cache.quantization import KV_DTYPES, check_kv_dtype
from dms_jax.checks import (
    Count,
    CountOnDevice,
    NotNegative,
    Options,
    Positive,
    Whole,
    check,
    show,
    show_options,
)
from dms_jax.errors import ConfigError
from dms_jax.generation.adapters import GivenAdapter, check_name, choose, replaced
from dms_jax.generation.grammar import make_matchers
from dms_jax.generation.in_flight import InFlight, steps_a_program
from dms_jax.generation.memory import pool_pages
from dms_jax.generation.notifier import Notifier
from dms_jax.generation.precompile import compile_all, compile_first
from dms_jax.generation.prefill import PrefillQueue
from dms_jax.generation.programs import bucket
from dms_jax.generation.requests import (
    Completion,
    OnTokens,
    Prompt,
    Request,
    State,
    check_call,
    check_list,
    check_stop,
    completion_of,
    encode_prompts,
    finished,
    make_requests,
)
from dms_jax.generation.runner import Runner
from dms_jax.generation.sampling import Filter, LanesFilter, Sampling
from dms_jax.generation.scheduler import Admission, Scheduler
from dms_jax.generation.text import TextTracker
from dms_jax.interrupts import keep_finished, unless_busy
from dms_jax.model.adapters import Slots
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy

# Returns the requests that came since the last call; None when no more will come. The argument is
# True if the engine is idle, and the call may block until a request comes.
Incoming = Callable[[bool], Sequence[Request] | None]


class EngineKeywords(TypedDict, total=False):
    """Options that are passed on; see `EngineOptions`."""

    page_size: CountOnDevice
    prefill_chunk: CountOnDevice
    prefill_tokens: CountOnDevice
    table_width: Count | None
    kv_dtype: str | None
    prefix_cache: Annotated[NotNegative | None, "give bytes of host memory"]


@dataclasses.dataclass(frozen=True)
class EngineOptions(Options):
    """How an engine stores and runs sequences.

    Attributes:
      num_lanes: the most sequences in the cache at a time.
      max_tokens: length of the longest sequence, prompt and answer, for which the page pool is
        sized; None for all of the model's positions.
      memory: bytes for the page pool, over all devices; None for as much as the sequences may need,
        within the free memory.
      chunk: decode steps between two polls for requests, no more than `max_tokens`; up to four runs
        of one compiled program of at least eight steps. If requests may come at any time, a chunk
        is one step while prompts wait for prefill.
      page_size: slots per page.
      prefill_chunk: prompt tokens of one sequence per compiled program, no more than
        `prefill_tokens`. Shorter prompts use narrower programs: half as wide, or, if the policy
        prefills token by token, a quarter and a sixteenth as wide.
      prefill_tokens: prompt tokens of all sequences together per compiled program, in each part of
        a mesh's axis `data`; smaller batches use smaller programs (`dms_jax.generation.prefill`).
        If requests may come at any time, also the most prompt tokens between two chunks of steps,
        which bounds the pause of an answer.
      table_width: pages per row in the compiled page table. None lets it grow to 16, 64, 256, ...
        pages, up to what `max_tokens` need, with one compilation for each width.
      kv_dtype: "float8_e4m3" stores keys and values in 8 bits; None uses the model's dtype.
      prefix_cache: bytes of host memory for cached prefixes (`dms_jax.generation.prefixes`), in
        addition to the free pages of the pool; 0 for the pool alone. None keeps no prefix between
        calls: a shared prefix is prefilled once only among the requests of one list.
    """

    num_lanes: CountOnDevice
    max_tokens: Count | None
    memory: Annotated[Positive | None, "give bytes"]
    chunk: CountOnDevice
    page_size: CountOnDevice = 64
    prefill_chunk: CountOnDevice = 512
    prefill_tokens: CountOnDevice = 8192
    table_width: Count | None = None
    kv_dtype: Annotated[str | None, f"give {' or '.join(map(repr, KV_DTYPES))}"] = None
    prefix_cache: Annotated[NotNegative | None, "give bytes of host memory"] = None

    def __post_init__(self):
        super().__post_init__()
        check_kv_dtype(self.kv_dtype)


@dataclasses.dataclass(frozen=True)
class Source:
    """Where the requests of a call come from, and who receives their updates.

    Attributes:
      requests: the requests that are known at the start. Without `incoming` they are all, and share
        one sampling, except for seeds.
      incoming: returns more requests while others run (a server), each with its own sampling and an
        unused index. They are not checked for size. None for a closed list.
      on_tokens: called with every `Update`: before the next programs are launched, but while they
        run with `incoming`. A cancellation takes effect after the programs that run.
      on_notified: called after the `on_tokens` calls of a chunk.
      on_end: called with every request that has ended, while the next programs run.
    """

    requests: Sequence[Request] = ()
    incoming: Incoming | None = None
    on_tokens: OnTokens | None = None
    on_notified: Callable[[], None] | None = None
    on_end: Callable[[Request], None] | None = None

    @property
    def given(self) -> bool:
        """Whether the answers are given and only scored (`Request.given`)."""
        return any(each.given is not None for each in self.requests)


class Call:
    """One call of an engine: it turns the requests of a source into completions.

    Attributes:
      scheduler: the requests, by state.
      in_flight: the programs that are launched and not collected.
    """

    def __init__(self, engine: "Engine", source: Source):
        self.engine, self.source, self.runner = engine, source, engine.runner
        self._given, self._is_open = source.given, source.incoming is not None
        self.runner.prefixes.closed = not self._is_open
        # Whether the updates of a chunk are sent before the next launch: a listener may cancel.
        self._waits = not self._is_open and source.on_tokens is not None
        end_tokens = () if source.given else engine.end_tokens
        tokenizer = None if source.given else engine.model.tokenizer
        tracker = TextTracker(tokenizer, end_tokens)
        self._notifier = Notifier(tracker, source.on_tokens, source.on_notified, source.on_end)
        self._prefill = PrefillQueue(engine.shapes, takes_turns=self._is_open)
        self.scheduler = Scheduler(engine.admission, self._prefill, self._notifier, source.requests)
        self.in_flight = InFlight(self.runner, end_tokens, self.scheduler.fail)
        self._filter = LanesFilter(self.runner.num_lanes)  # of requests with their own sampling

    def step(self) -> bool:
        """Takes one turn of the loop; returns False when there is nothing left to do."""
        scheduler = self.scheduler
        if not self._accept():
            return False
        if scheduler.to_cancel:  # before lanes are given away
            self._drain()
            scheduler.finish_and_notify()
        if self._is_open or not self._prefill.items:
            scheduler.admit()
        if self._prefill.items:
            self._launch_prefill()
            if not self._is_open and (self._prefill.items or scheduler.held_back):
                if not self._prefill.items:  # requests whose prefix is ready come before steps
                    self.in_flight.collect_prompts()
                self._notifier.notify()
                return True
        if self._waits and self.in_flight.drawn:
            self.in_flight.collect_prompts()
            scheduler.finish_and_notify()
        if scheduler.decoding:
            self._decode()
        else:
            self._notifier.notify()
        return True

    @property
    def unfinished(self) -> bool:
        """Whether requests wait or run, or programs are in flight."""
        return not self.scheduler.idle or self.in_flight.has_steps

    def close(self) -> None:
        """Sends the remaining updates, also after an error."""
        self.in_flight.close()
        self._notifier.notify()

    def compile_first(self, compiled: set[Hashable]) -> None:
        """Compiles the first programs of a closed list, unless `compiled` has their key."""
        num_steps, requests = self.engine.chunk, self.source.requests
        longest = max((len(each.prompt) for each in requests), default=0)
        self.runner.reservation.expect(longest + num_steps)
        if requests:
            compile_first(
                self.runner,
                self._prefill.shapes,
                requests,
                self._rule(),
                steps_a_program(self.runner, num_steps),
                self.in_flight.end_tokens,
                compiled,
            )

    # -- accept -----------------------------------------------------------------------------------

    def _accept(self) -> bool:
        """Queues new requests; returns whether there are requests to serve or may be later."""
        scheduler, incoming = self.scheduler, self.source.incoming
        if idle := scheduler.idle:
            self._notifier.notify()
            self.in_flight.collect_steps()  # of answers that a stop string ended
        came = None if incoming is None else incoming(idle)
        self.engine.check_requests(came or ())  # unless the source did
        scheduler.accept(came or ())
        return came is not None or not scheduler.idle

    def _rule(self) -> Filter | None:
        """Returns the filter of the next program, shared or per lane; None if answers are given."""
        if self._given:
            return None
        if self.source.incoming is None:
            return self.source.requests[0].sampling.filter
        running = self.scheduler.running
        return self._filter.of({lane: each.sampling for lane, each in running.items()})

    # -- collect ----------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Sends queued updates, and waits for everything in flight."""
        self._notifier.notify()  # before answers grow beyond it
        self.in_flight.collect_steps()
        self.in_flight.collect_prompts()

    def _finish_steps(self) -> None:
        """Waits for the steps in flight and ends finished requests, which frees pages.

        Nothing is cancelled: prompts and first tokens stay in flight.
        """
        if self.in_flight.has_steps:
            self._notifier.notify()  # before answers grow beyond it
            self.in_flight.collect_steps()
            self.scheduler.finish(cancel=False)

    def _finish_last_chunk(self, programs: int, reads_on: bool) -> Generator[None]:
        """Sends the updates of the last chunk and collects its last programs, in short parts."""
        yield from self._notifier.notify_by_parts()  # before answers grow beyond them
        if not reads_on:  # else the next parts of prompts are launched before the steps run
            self.in_flight.collect_prompts()
        for _ in range(programs):
            yield
            self.in_flight.collect_steps(1)

    # -- launch -----------------------------------------------------------------------------------

    def _launch_prefill(self) -> None:
        """Launches prefill, and draws the first tokens of complete prompts.

        Launches one program, or, if answers wait for their next steps, as many as fit into
        `prefill_tokens`, up to the first that prefills token by token.
        """
        scheduler, runner = self.scheduler, self.runner
        fills_turn = self._is_open and bool(scheduler.decoding)
        room = self.engine.prefill_tokens
        while batch := self._prefill.next_batch(room if fills_turn else None):
            extra = np.zeros(runner.num_lanes, np.int64)
            for lane, tokens in batch.tokens.items():
                extra[lane] = len(tokens)
            if not self._reserve_or_preempt(extra, prompt=batch.prompt):
                continue  # with the requests that are left, before others are admitted
            program = runner.extend(batch)
            self._prefill.advance(batch)
            scheduler.record_peak_bytes()
            runner.reservation.trim()
            requests = {lane: scheduler.running[lane] for lane in batch.tokens}
            self.in_flight.add_prefill(program, requests)
            scheduler.take_prefixes(batch.tokens, self.in_flight.collect_prompts)
            room -= batch.shape.most
            if not (fills_turn and batch.shape.one_pass):
                break
        if not (source_of := self._prefill.take_complete()):
            return
        shared = {lane: source for lane, source in source_of.items() if lane != source}
        if shared:  # copies need pages at once
            self._finish_steps()
        for lane in source_of:
            scheduler.running[lane].state = State.DECODE
        self.in_flight.launch_first_tokens(source_of, scheduler.running, self._rule())
        if shared:
            scheduler.fork(shared)

    def _reserve_or_preempt(self, extra: np.ndarray, *, prompt: bool) -> bool:
        """Reserves pages, preempting requests until they fit; False if any left its lane."""
        scheduler, reservation = self.scheduler, self.runner.reservation
        before = len(scheduler.running)
        while not reservation.fits(extra, prompt=prompt):
            if self.in_flight.drawn or self.in_flight.has_steps:  # requests that ended free pages
                self._drain()
                scheduler.finish()
                extra[[lane for lane in range(len(extra)) if lane not in scheduler.running]] = 0
                continue
            self.in_flight.collect_prompts()
            extra[scheduler.preempt()] = 0
        reservation.reserve(extra, prompt=prompt)
        return len(scheduler.running) == before

    def _decode(self) -> None:
        """Launches a chunk of steps; collects the last chunk, and what may not stay in flight."""
        scheduler, in_flight = self.scheduler, self.in_flight
        reservation, num_steps = self.runner.reservation, self.engine.chunk
        if self._is_open and self._prefill.has_tokens:
            num_steps = min(num_steps, self.engine.steps_between_prompts)
        extra = np.minimum(in_flight.remaining(scheduler.decoding), num_steps)
        if in_flight.has_steps and not reservation.fits_table(extra):
            self._finish_steps()
            extra = np.minimum(in_flight.remaining(scheduler.decoding), num_steps)
        self._reserve_or_preempt(extra, prompt=False)
        before = len(in_flight.programs)
        reports_now = self._is_open and bool(in_flight.drawn or in_flight.has_steps)
        reads_on = in_flight.reads_on
        with contextlib.closing(self._finish_last_chunk(before, reads_on)) as work:
            given = self._rule(), num_steps, extra, work
            in_flight.launch_steps(scheduler.decoding, *given)
            collections.deque(work, maxlen=0)  # the rest, while the steps run
        reservation.trim()
        scheduler.record_peak_bytes()
        if reports_now:  # first tokens are sent before their next steps are collected
            scheduler.finish_and_notify(cancel=not reads_on)
        self._collect_last_steps()
        if self._waits:
            scheduler.finish_and_notify()
        else:
            scheduler.finish(cancel=not reads_on)

    def _collect_last_steps(self) -> None:
        """Collects the programs of a chunk that need not stay in flight until the next launch.

        If requests may join, the last one stays, which keeps the device busy meanwhile; all of them
        if only the next chunk can follow. Of steps with grammars, those without a check stay.
        """
        scheduler, in_flight = self.scheduler, self.in_flight
        if self._waits or not in_flight.may_run_on(scheduler.decoding):
            in_flight.collect_steps()
        elif in_flight.is_checking:
            in_flight.collect_steps(len(in_flight.programs))
        elif self._is_open or scheduler.waiting:
            in_flight.collect_steps(len(in_flight.programs) - 1)
        elif scheduler.cancelled:
            in_flight.collect_steps()


class Engine:
    """A model, a policy and a pool, ready to serve requests.

    It serves one call at a time: a second one, from another thread or from inside a callback,
    raises BusyError and changes nothing. Threads that generate in parallel need an engine each.

    Args:
      model: the model to run.
      policy: the cache policy; None for the one that the checkpoint declares, or that the adapters
        were trained for.
      adapters: adapters of the model by name, as directories or as models that have them. Each
        request runs with one of them, or with the plain model if that runs under the policy.
      num_lanes, max_tokens, memory, chunk, **options: see `EngineOptions`.

    Attributes:
      runner: the cache and the programs over it.
      admission: lanes and pages for requests.
      shapes: the compiled shapes of prompts.
      end_tokens: token ids that end an answer.

    Raises:
      ConfigError: an option is malformed, or the policy does not fit the model or an adapter.
      CheckpointError: an adapter cannot be read, or was trained on another checkpoint.
      CapacityError: the memory does not hold one page for each row of a sequence, or the lanes' own
        memory (logits, lengths, page tables).
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
        chunk: int = 32,
        **options: Unpack[EngineKeywords],
    ):
        check_model(model)
        compilation.prepare()
        self.options = EngineOptions(num_lanes, max_tokens, memory, chunk, **options)
        num_lanes, page_size = self.options.num_lanes, self.options.page_size
        self.model = model
        self.policy, slots = choose(model, policy, adapters)
        model = _with_slots(model, slots)
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
            prefix_cache=self.options.prefix_cache,
            slots=slots,
        )
        self.end_tokens = model.generation.eos_token_ids
        prefill_chunk = min(self.options.prefill_chunk, self.options.prefill_tokens)
        self.admission = Admission(self.runner, self.chunk, prefill_chunk, self.end_tokens)
        longest = min(prefill_chunk, max(8, bucket(max_tokens)))
        self.shapes = self.runner.prompt_shapes(longest, self.options.prefill_tokens)
        self._lock = threading.Lock()
        self._call: Call | None = None  # the running one, or after an error the last
        self._compiled: set[Hashable] = set()  # see `compile_first`

    def __reduce__(self) -> Any:
        raise ConfigError(
            "An engine cannot be pickled or copied: it holds a device's memory. Make another from "
            "the model, which each process loads for itself (dms_jax.load)."
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        sampling: Sampling | None = None,
        on_tokens: OnTokens | None = None,
        adapter: str | Sequence[str | None] | None = None,
    ) -> list[Completion]:
        """Completes prompts as `dms_jax.generate` does.

        `adapter` names the adapter of all prompts, or of each; None is the plain model.
        """
        check_list(prompts)
        sampling = check_call(sampling, on_tokens)
        each = [adapter] * len(prompts) if adapter is None or isinstance(adapter, str) else adapter
        if not isinstance(each, Sequence) or len(each) != len(prompts):
            raise ConfigError(
                f"adapter must be a name, or a list of one for each of {len(prompts)} prompts, got "
                f"{show(adapter)}."
            )
        for name in each:
            self.check_adapter(name)
        tokens = encode_prompts(self.model, prompts)
        requests = make_requests(self.model.config, tokens, sampling, adapters=each)
        return self.serve(Source(requests, on_tokens=on_tokens))

    def serve(self, source: Source) -> list[Completion]:
        """Serves a source to its end; returns the completions of its initial requests.

        An exception, an interrupt included, leaves the engine usable and carries the completions of
        the requests that had ended: `error.finished` is {index: Completion}.

        Raises:
          BusyError: it is serving another call, in another thread or further up the stack.
          CapacityError: a request does not fit; `check_room` says which requests are refused at
            once.
          ConfigError: there are stop strings but no tokenizer, or a grammar is not supported.
        """
        with self.open(source) as call:
            while call.step():
                pass
        return list(map(completion_of, source.requests))

    @contextlib.contextmanager
    def open(self, source: Source) -> Iterator[Call]:
        """Opens a call that the caller drives turn by turn: `with engine.open(source) as call`.

        `call.step()` is one turn of the loop. Between two turns the caller may inspect requests,
        and add more through `source.incoming`. Requests that have not ended when the context closes
        stay as they are. Raises as `serve` does.
        """
        requests = list(source.requests)
        self.check_requests(requests)
        done = keep_finished(lambda: finished(requests))
        with done, unless_busy(self._lock, "The engine"), compilation.reported("Generation"):
            self.check_room(requests)
            self._call = call = Call(self, source)
            try:
                with self.runner.working():
                    call.compile_first(self._compiled)
                    yield call
                if call.unfinished:  # the caller has left, and nobody owns the cached sequences
                    self.runner.release()
                elif not self.runner.prefixes.keeps:
                    self.runner.prefixes.clear()
                self._call = None  # its requests belong to the caller
            finally:
                call.close()

    def check_requests(self, requests: Sequence[Request]) -> None:
        """Checks that requests can run here, and makes the matchers of their grammars.

        `serve` does it. Compiling a large grammar can take a second: a server calls this before, in
        another thread than the engine's.

        Raises:
          ConfigError: there is no such adapter, there are stop strings but no tokenizer, or a
            grammar is not supported.
        """
        for adapter in {each.adapter for each in requests}:
            self.check_adapter(adapter)
        for request in requests:
            check_stop(self.model, request.sampling)
        make_matchers(self.model, requests)

    def cancel(self, indices: Iterable[int]) -> None:
        """Cancels requests of the running call; call it from `on_tokens` or `Source.incoming`.

        They end before the next chunk, or after it if it was launched already; queued requests end
        too. They keep the tokens generated so far, their finish reason is "cancelled", and their
        pages are freed. Each has a last update, and a completion like any other. Indices of
        requests that have ended, or are not in the call, are ignored.

        Raises:
          ConfigError: `indices` is no sequence, or has an item that is not a whole number.
        """
        if not isinstance(indices, Iterable):
            check("cancel: indices", indices, Sequence[Whole])
        checked = {check("cancel: index", index, Whole) for index in indices}
        if (call := self._call) is not None:
            call.scheduler.cancelled.update(checked)

    @property
    def steps_between_prompts(self) -> int:
        """Steps of a chunk while prompts wait for prefill, where requests may come at any time.

        One: with more, prompts would wait for several steps after every `prefill_tokens`. With 256
        clients and prompts of 8,192 tokens, most of the time would go to steps of a few lanes. If
        all prompts together fit into `prefill_tokens`, none wait.
        """
        most = self.options.num_lanes * self.runner.max_tokens
        return 1 if most > self.prefill_tokens else self.chunk

    @property
    def prefill_tokens(self) -> int:
        """The most prompt tokens between two chunks of steps, on all devices together."""
        return self.options.prefill_tokens * self.runner.data_shards

    @property
    def adapters(self) -> tuple[str | None, ...]:
        """The names of its adapters, after None if the plain model runs too."""
        slots = self.runner.slots
        return (None,) if slots is None else slots.names

    def check_adapter(self, name: str | None) -> None:
        """Raises ConfigError if there is no adapter of that name; None is the plain model."""
        check_name(self.runner.slots, name)

    def update(
        self,
        parameters: Transformer | nnx.State | None = None,
        *,
        adapters: Mapping[str, GivenAdapter] | None = None,
    ) -> None:
        """Replaces weights; nothing is compiled, and the cache keeps its memory.

        Refused while a call runs, so no request sees both versions. Drops the cached prefixes
        computed with the replaced weights. If anything does not fit, nothing changes.

        Args:
          parameters: all parameters of the model, or some (`LanguageModel.with_parameters`).
          adapters: new weights of the engine's adapters, by name.

        Raises:
          BusyError: it is serving a call.
          ConfigError: a parameter has another shape or type than the old one; or an adapter has
            another policy or a larger rank.
          CheckpointError: an adapter cannot be read, or was trained on another checkpoint.
        """
        with unless_busy(self._lock, "The engine"):
            self.replace(parameters, adapters or {})

    def replace(
        self, parameters: Transformer | nnx.State | None, adapters: Mapping[str, GivenAdapter]
    ) -> None:
        """Like `update`, but between two turns of a call; no request uses the old weights."""
        runner, slots = self.runner, self.runner.slots
        model = self.model if parameters is None else self.model.with_parameters(parameters)
        slots = replaced(model, slots, self.policy, adapters)
        joined = _with_slots(model, slots)
        if slots is not None:  # same shapes, types and placement as the old ones
            joined = runner.model.with_parameters(joined.transformer)
        self.model, runner.model, runner.slots = model, joined, slots
        for name in (*adapters,) if parameters is None else runner.prefixes.adapters:
            runner.prefixes.drop(name)

    def warm(self) -> int:
        """Compiles all programs that `incoming` requests can need; returns their number.

        Raises:
          BusyError: it is serving a call.
        """
        with unless_busy(self._lock, "The engine"), self.runner.working():
            chunks = self.chunk, self.steps_between_prompts
            sizes = {steps_a_program(self.runner, each) for each in chunks}
            return compile_all(self.runner, self.shapes, sizes, self.end_tokens)

    @property
    def running(self) -> list[Request]:
        """The requests in lanes, oldest first; after an error, those that were in lanes then."""
        call = self._call
        return [] if call is None else list(call.scheduler.running.values())

    @property
    def cancelled(self) -> set[int]:
        """The indices of requests to cancel; after an error, those that had not ended by then."""
        call = self._call
        return set() if call is None else set(call.scheduler.cancelled)

    def check_room(self, requests: list[Request]) -> None:
        """Refuses requests that can never fit, before any of them runs.

        Raises:
          CapacityError: a request cannot fit, whatever the model generates; see `Admission.check`.
        """
        self.runner.recover()
        longest = max((request.max_length for request in requests), default=1)
        self.runner.reservation.allow_length(longest)
        self.admission.check(requests)


def _with_slots(model: LanguageModel, slots: Slots | None) -> LanguageModel:
    """Returns the model with the adapters of all slots joined; the model itself without slots."""
    if slots is None:
        return model
    return dataclasses.replace(model, transformer=slots.join(model))
