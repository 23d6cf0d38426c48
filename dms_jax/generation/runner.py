"""The device side of generation: a cache, and the compiled programs that run over its lanes.

No work on the host scales with the number of tokens: pages are reserved before each program
(`runner.reservation`), C decode steps are one program, and their results are one transfer. The page
table of steps stays on the device, and only its changes are sent (it has 11 MB for 256 sequences of
8,448 tokens of Qwen2.5-1.5B). A program is launched, and collected later, while others are in
flight.

A short prompt that several requests share is prefilled in one lane, whose sequence is copied to the
lanes of the others (chains of a long one continue a cached prefix, see `prefixes`):

    lane 0   | prompt -> pages, lengths, policy state, hidden state of the last token
    lane 1   |    copies of the pages, the lengths and the state; its own first token
    lane 2   |    from the same hidden state, drawn with its own key

What a policy does to a prompt does not depend on the lane: its random draws are hashes of a seed,
the layer, the KV head and the position (`policies/draws.py`). So copies equal prompts that were
prefilled one by one. Pages are copied whole, because policies overwrite slots in place.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from dms_jax import sharding
from dms_jax.cache import PageAllocator
from dms_jax.cache.host_values import HostValues, Tail
from dms_jax.devices import fits_device
from dms_jax.errors import ConfigError
from dms_jax.generation import programs
from dms_jax.generation.copies import Copies, Load
from dms_jax.generation.prefill import (
    SATURATING,
    PrefillBatch,
    PromptShapes,
    Shape,
    Shapes,
    cuts_prompts,
)
from dms_jax.generation.prefixes import Prefixes
from dms_jax.generation.programs import Packed, Steps
from dms_jax.generation.requests import Request
from dms_jax.generation.reservation import Reservation
from dms_jax.generation.sampling import Filter, Given
from dms_jax.interrupts import Working
from dms_jax.model.adapters import Slots
from dms_jax.model.caching import layer_page_bytes, page_bytes, state_bytes
from dms_jax.model.language_model import LanguageModel, use_mesh
from dms_jax.policies import Policy

BLOCK_BYTES = 2**27  # of pages copied at a time; held twice meanwhile
CHECKED_STEPS = 8  # of a program whose tokens the host checks, at most
TRAIL_BYTES = 2**28  # of what such a program keeps to take its steps back, at most
CELLS = 2**13  # cells of the page table changed at a time; smaller tables are sent whole


@dataclasses.dataclass(frozen=True)
class PrefillInFlight:
    """A prefill program in flight.

    Attributes:
      results: its results, on the device until they are collected.
      entries: lane -> its entry in the program, and the number of its tokens.
      rows: L * K if the tokens ran in one pass (all hold a slot in each row at once), else 0.
      cuts: whether the policy cuts rows after the last token of a prompt.
    """

    results: programs.Extension
    entries: dict[int, tuple[int, int]]
    rows: int
    cuts: bool

    def usage(self) -> dict[int, tuple[Int[np.ndarray, " n"], int, int]]:
        """Waits for the program; returns the use of the cache by lane, summed over its rows.

        These are the live slots after each token, the slots held at once (0 if the tokens ran one
        by one), and the slots in use at the end, after any cut.
        """
        live, found = np.asarray(self.results.live), {}
        before = np.asarray(self.results.before) if self.rows else np.zeros(len(live), int)
        left = np.asarray(self.results.lengths).sum((0, 2)) if self.cuts else None
        for lane, (entry, count) in self.entries.items():
            own = live[entry, :count]
            held = int(before[entry]) + self.rows * count
            found[lane] = own, held, int(own[-1] if left is None else left[lane])
        return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepsInFlight:
    """Launched decode steps, which `Runner.collect` waits for.

    Attributes:
      most: Int[B], the most tokens that each lane takes.
      epochs: Int[B], those of `Reservation` when they were launched.
      tail: the values that the host must write, if it holds any.
      table: the page table that they run with; None unless the host holds values.
      newest: Int[B] on the device, the newest token of each lane after them, if nothing has
        replaced one meanwhile; None if a check may have.
    """

    most: Int[np.ndarray, " B"]
    epochs: Int[np.ndarray, " B"]
    tail: Tail | None
    table: Int[np.ndarray, "L B K M"] | None
    newest: Any = None

    def read(self) -> tuple[Steps, Bool[np.ndarray, " B"]]:
        """Waits for the steps; returns them, and the lanes whose answer is known to have ended."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk(StepsInFlight):
    """Decode steps of one program.

    Attributes:
      results: the packed `programs.Steps`, on the device.
      end_tokens: token ids that end an answer.
      endless: Bool[B], lanes that ignore end tokens.
    """

    results: Packed
    end_tokens: tuple[int, ...]
    endless: Bool[np.ndarray, " B"]

    def read(self) -> tuple[Steps, Bool[np.ndarray, " B"]]:
        steps = self.results.read()
        # A lane without steps was idle, perhaps after an end token, and may have been reused since.
        ended = np.isin(steps.tokens[-1], self.end_tokens) & (self.most > 0)
        return steps, ended & ~self.endless


def _send_to_host(results: Any) -> None:
    """Starts the transfer of a program's results, which is waited for when they are read."""
    for leaf in jax.tree.leaves(results):
        leaf.copy_to_host_async()


def sends_changes(size: int) -> bool:
    """Whether only changes of a page table of `size` cells are sent, not the whole table."""
    return size > 4 * CELLS


def build_batch(
    tokens: Mapping[int, np.ndarray],
    *,
    num_lanes: int,
    shape: Shape,
    fixed_lanes: bool,
    groups: int,
) -> tuple[Int[np.ndarray, " b"], Int[np.ndarray, "b T"], Int[np.ndarray, " b"]]:
    """Returns the entries of a prefill program: lanes, padded tokens, counts.

    With fixed lanes each has an entry. Otherwise there is at least one entry for each lane with
    tokens, and each of `groups` groups of lanes has its part of the entries. Unused entries have
    lane `num_lanes`, which does not exist.

    Raises:
      ValueError: there are more tokens than places.
    """
    total = sum(map(len, tokens.values()))
    if shape.places is not None and total > shape.places:
        raise ValueError(f"{total} tokens have no room in a program with {shape.places} places.")
    if fixed_lanes:
        lanes = np.arange(num_lanes, dtype=np.int32)
    else:
        by_group = np.full((groups, shape.entries // groups), num_lanes, np.int32)
        for group, entries in enumerate(by_group):
            own = [lane for lane in sorted(tokens) if lane * groups // num_lanes == group]
            entries[: len(own)] = own
        lanes = by_group.reshape(-1)
    padded = np.zeros((len(lanes), shape.width), np.int32)
    counts = np.zeros(len(lanes), np.int32)
    for entry, lane in enumerate(lanes.tolist()):
        if lane in tokens:
            counts[entry] = len(tokens[lane])
            padded[entry, : counts[entry]] = tokens[lane]
    return lanes, padded, counts


class Runner:
    """A cache of B lanes (one sequence each) and the programs that run over it.

    Attributes:
      num_lanes: number of lanes (B).
      slots: the adapters that requests choose from; None if the model has one or none.
      traced_policy: the policy with its numbers on the device, which programs take.
      seen: Int[B] on the host, the number of tokens that each lane has processed.
      seeds: UInt32[B, 2] of the request in each lane; see `programs.request_keys`.
      endless: Bool[B], lanes whose request ignores end tokens.
      num_shards: number of devices with separate pages.
      page_bytes: bytes of a page: keys, values and the policy's state per page.
      data_shards: number of groups of lanes, each with pages on separate devices.
      reservation: the pages and lengths of the rows.
      prefixes: the cached prefixes, in pages that no row needs.
      hidden: [B, E] on the device, the hidden state of the last prefilled token of each lane.
      max_tokens: the sequence length that the cache is sized for; longer ones may fit too.
      copies: copies of prefixes that are launched before the next program.
      dirty: whether there is no cache, or a failure may have left it inconsistent; see `working`.
    """

    def __init__(
        self,
        model: LanguageModel,
        policy: Policy,
        *,
        num_lanes: int,
        num_pages: int,
        page_size: int,
        max_tokens: int | None = None,
        table_width: int | None = None,
        kv_dtype: str | None = None,
        prefix_cache: float | int | None = None,
        slots: Slots | None = None,
    ):
        self.model, self.policy, self.page_size = model, policy, page_size
        self.slots = slots
        self.traced_policy = jax.tree.map(self.everywhere, jax.device_put(policy))
        self.num_lanes, self._kv_dtype = num_lanes, kv_dtype
        positions = model.config.max_position_embeddings
        self.max_tokens = max_tokens or positions
        whole = policy.footprint(positions, page_size=page_size)
        self._keeps_all = whole.at_least >= positions and model.config.window is None
        self._cache: Any = None
        self.hidden: Any = None
        self._table: jax.Array | None = None  # page table of steps, on the device
        config = model.config
        self.page_bytes = page_bytes(config, policy, page_size, model.dtype, kv_dtype)
        groups = policy.groups(config.num_full_layers)
        self._value_layers = next(
            (group.start for group in groups if group.host_values), config.num_layers
        )
        if not all(group.host_values for group in groups if group.start >= self._value_layers):
            raise ConfigError(
                f"{policy.name}: values in host memory are those of the last layers, and its "
                "groups put a layer with values on the device behind one with values on the host."
            )
        # Every layer has its share of the pages; those of values in host memory come last.
        self._num_pages, self._on_host = num_pages, self._value_layers < config.num_layers
        self._value_pages = num_pages * self._value_layers // config.num_layers
        with use_mesh(model.mesh):
            self._on_mesh = sharding.has_mesh()
            data, heads = sharding.row_axes(num_lanes, config.num_kv_heads)
            self.data_shards = sharding.axis_size(data)
            self.num_shards = self.data_shards * sharding.axis_size(heads)
            # If `data` does not divide the lanes, it could divide a subset, and would split it.
            self.fixed_lanes = not data and sharding.axis_size(sharding.DATA) > 1
        if self._on_host and self._on_mesh:
            raise ConfigError(
                f"{policy.name}: values in host memory are supported on one device, not on a mesh; "
                "give the policy values='device', or load the model without a mesh."
            )
        self.host: HostValues | None = None
        self.reservation = Reservation(
            policy,
            self._make_allocator(),
            page_size=page_size,
            windows=np.where(config.windowed, config.window or 0, 0),
            max_tokens=self.max_tokens,
            table_width=table_width,
            layer_bytes=layer_page_bytes(config, policy, page_size, model.dtype, kv_dtype),
            state_bytes=state_bytes(config, policy, model.dtype),
            page_bytes=self.page_bytes,
        )
        self.prefixes = Prefixes(self, prefix_cache)
        self.restart()

    @property
    def appends(self) -> bool:
        """Whether no slot is ever overwritten: the policy appends, and no layer has a window."""
        return self.policy.appends and self.model.config.window is None

    @property
    def cache(self) -> Any:
        """The cache on the device, after the copies that are not launched yet."""
        if self.copies:
            self._cache = self.copies.launched(self._cache)
        return self._cache

    @cache.setter
    def cache(self, cache: Any) -> None:
        self._cache = cache

    def working(self) -> Working:
        """A context in which programs run. If one fails, the cache is freed.

        `dirty` is set from before the first program until after the last, and while there is no
        cache; the next call creates a new one. Lack of device memory raises OutOfMemoryError.
        """
        return Working(self)

    def recover(self) -> None:
        """Makes a new cache if `dirty`."""
        if self.dirty:
            self.restart()

    def restart(self) -> None:
        """Replaces the cache by an empty one."""
        self.release()  # first: memory may not hold two
        config = self.model.config
        num_pages = self.reservation.allocator.pages_per_shard * self.num_shards
        with use_mesh(self.model.mesh):
            make = programs.make_cache(
                self.model.mesh,
                config,
                jax.tree.structure(self.policy),
                self.num_lanes,
                num_pages,
                self.page_size,
                self.model.dtype,
                self._kv_dtype,
                self._value_pages if self._on_host else None,
            )
            with fits_device(
                f"The device has no room for a cache of {num_pages} pages "
                f"({num_pages * self.page_bytes:,} bytes). Give it less (`memory`)."
            ):
                # Otherwise only the first program would fail for lack of memory.
                self.cache = jax.block_until_ready(make())
        if self._on_host:
            self.host = HostValues(
                first_page=self._value_pages,
                num_pages=self._num_pages - self._value_pages,
                page_size=self.page_size,
                head_dim=self.cache.k_pages.shape[-1],
                dtype=self.cache.k_pages.dtype,
            )
        self.set_adapters({})
        self.hidden = self.everywhere(
            np.zeros((self.num_lanes, config.hidden_size), self.model.dtype)
        )
        self.dirty = False

    def release(self) -> None:
        """Frees the memory of the cache; `recover` makes another one."""
        self.dirty = True
        self._table = None
        self.copies = Copies(self.num_lanes, self._num_pages // self.num_shards, self.page_bytes)
        if self._cache is not None:
            for leaf in jax.tree.leaves(self._cache):
                leaf.delete()
            self._cache = self.hidden = None
        if self.host is not None:
            self.host.delete()
            self.host = None
        self.reservation.reset(self._make_allocator())
        self.prefixes.reset()
        self.seen = np.zeros(self.num_lanes, np.int64)
        self.seeds = np.zeros((self.num_lanes, 2), np.uint32)
        self.endless = np.zeros(self.num_lanes, bool)
        self._max_lengths = np.zeros(self.num_lanes, np.int32)
        self._adapter_of = list(self.slots.names[:1]) * self.num_lanes if self.slots else []

    def _make_allocator(self) -> PageAllocator:
        """Returns the pages of an empty cache."""
        config = self.model.config
        return PageAllocator(
            num_layers=config.num_layers,
            num_sequences=self.num_lanes,
            num_kv_heads=config.num_kv_heads,
            pages_per_shard=self._num_pages // self.num_shards,
            page_size=self.page_size,
            sequence_shards=self.data_shards,
            head_shards=self.num_shards // self.data_shards,
            first=(self._value_layers, self._value_pages) if self._on_host else (0, 0),
        )

    def clear(self, lanes: list[int]) -> None:
        """Empties lanes and releases their pages."""
        self.reservation.release_lanes(lanes)
        self.seen[lanes] = 0
        mask = np.zeros(self.num_lanes, bool)
        mask[lanes] = True
        with use_mesh(self.model.mesh):
            self.cache = programs.clear(
                self.cache, mask, self.model.config, self.traced_policy, self.model.dtype
            )

    def assign(self, requests: Mapping[int, Request]) -> None:
        """Sets what programs need to know of the requests that get lanes.

        Args:
          requests: lane -> its request.
        """
        lanes, given = list(requests), requests.values()
        # Copies: programs in flight may use the old arrays.
        self.seeds, self.endless = self.seeds.copy(), self.endless.copy()
        self.seeds[lanes] = [(each.seed, each.copy) for each in given]
        self.endless[lanes] = [each.sampling.ignore_eos for each in given]
        self.set_max_lengths({lane: each.max_length for lane, each in requests.items()})
        self.set_adapters({lane: each.adapter for lane, each in requests.items()})

    def set_max_lengths(self, tokens: dict[int, int]) -> None:
        """Sets the maximum length of lanes, from which a compression ratio's budget follows."""
        self.reservation.allow_length(max(tokens.values()))
        if self.policy.for_length(1) is self.policy:
            return
        self._max_lengths[list(tokens)] = list(tokens.values())
        with use_mesh(self.model.mesh):
            self.cache = programs.set_max_lengths(self.cache, self._max_lengths.copy())

    def set_adapters(self, names: dict[int, str | None]) -> None:
        """Sets the adapters of lanes, if the engine has several."""
        if self.slots is None:
            return
        for lane, name in names.items():
            self._adapter_of[lane] = name
        place, mesh = None, self.model.mesh
        if mesh is not None:
            with use_mesh(mesh):
                data, _ = sharding.row_axes(self.num_lanes, self.model.config.num_kv_heads)
            place = NamedSharding(mesh, PartitionSpec(data))
        adapters = jax.device_put(self.slots.lanes(self._adapter_of), place)
        self.cache = dataclasses.replace(self.cache, adapters=adapters)

    def everywhere(self, x: np.ndarray | jax.Array) -> np.ndarray | jax.Array:
        """Replicates an array over the mesh.

        Programs are compiled for the placement of their arguments.
        """
        if self.model.mesh is None:
            return x
        return jax.device_put(x, NamedSharding(self.model.mesh, PartitionSpec()))

    def prompt_shapes(self, chunk: int, tokens: int) -> PromptShapes:
        """Returns the shapes for prompts in chunks of at most `chunk` of a program's `tokens`."""
        parallel, config = self.policy.parallel, self.model.config
        parameters = sum(each.size for each in jax.tree.leaves(self.model.transformer.layers))

        def shapes(one_pass: bool) -> Shapes:
            # Answers after a one-pass prompt use its shapes: they are seldom recomputed.
            few = (one_pass or parallel == "prompts") and not self.fixed_lanes
            return Shapes.of(
                chunk,
                min(tokens, SATURATING) if one_pass and parallel == "never" else tokens,
                self.num_lanes,
                groups=self.data_shards,
                few=few,
                unpadded=few and not self._on_mesh,
                # A chunk of one token is a decode step, unless the policy treats prompts apart.
                one_pass=one_pass and (chunk > 1 or parallel == "prompts"),
                layer_size=parameters // config.num_layers,
            )

        return PromptShapes(one_pass=shapes(True), one_by_one=shapes(False))

    # -- running ----------------------------------------------------------------------------------

    @property
    def takes_back(self) -> bool:
        """Whether decode steps can be taken back; see `checked_steps`."""
        return self.host is None and self.policy.can_undo

    def checked_size(self, num_steps: int) -> int:
        """Returns the most steps of a program whose tokens the host checks; divides `num_steps`."""
        if not self.takes_back:
            return 1
        most = CHECKED_STEPS
        if not self.appends:
            config = self.model.config
            saves = config.window is None and not self._on_mesh
            most = min(most, self.policy.visible_window + 1) if saves else 1
            slots = config.num_layers * config.num_kv_heads * self.page_bytes // self.page_size
            a_step = self.num_lanes * (slots + state_bytes(config, self.policy, self.model.dtype))
            most = max(min(most, TRAIL_BYTES // a_step), 1)
        return next(size for size in range(most, 0, -1) if num_steps % size == 0)

    def blank_trail(self, num_steps: int) -> programs.Trail:
        """Returns the trail of that many checked steps with zeros, to compile `redraw`."""
        cache = self.cache

        def after(x: Any) -> Any:
            zeros = np.zeros((num_steps, *x.shape), x.dtype)
            if self.model.mesh is None:
                return zeros
            spec = PartitionSpec(None, *x.sharding.spec)
            return jax.device_put(zeros, NamedSharding(self.model.mesh, spec))

        hidden = self.everywhere(np.zeros((num_steps, *self.hidden.shape), self.hidden.dtype))
        seen = self.everywhere(np.zeros((num_steps, self.num_lanes), np.int32))
        if not self.takes_back:
            return programs.Trail(hidden, seen)
        overwritten = None
        if num_steps > 1 and not self.appends:
            shape = *cache.lengths.shape, num_steps
            pool = jax.tree.map(lambda x: np.zeros((*shape, *x.shape[2:]), x.dtype), cache.pool)
            overwritten = programs.Overwritten(np.zeros(shape, np.int32), pool)
        lengths, rows = jax.tree.map(after, (cache.lengths, cache.row_state))
        return programs.Trail(hidden, seen, lengths, rows, overwritten)

    @property
    def cached(self) -> tuple[Any, ...]:
        """The first arguments of programs over the cache: weights, cache, values in host memory."""
        host = None if self.host is None else self.host.rows
        return self.model.transformer, self.cache, host

    def extend(self, batch: PrefillBatch) -> PrefillInFlight:
        """Launches the next tokens of some lanes through the cache (pages must be reserved)."""
        num_lanes, shape = self.num_lanes, batch.shape
        lanes, tokens, counts = build_batch(
            batch.tokens,
            num_lanes=num_lanes,
            shape=shape,
            fixed_lanes=self.fixed_lanes,
            groups=self.data_shards,
        )
        ends = np.zeros(num_lanes + 1, bool)
        ends[list(batch.ends_prompt)] = True
        # If no prompt ends, compile no code that cuts rows.
        cut = ends[lanes] if batch.ends_prompt and cuts_prompts(self.policy, shape) else None
        rows = None if self.fixed_lanes else lanes
        # A copy: the allocator changes its table while the program runs.
        table = self.reservation.table()[:, np.minimum(lanes, num_lanes - 1)]
        table[:, lanes == num_lanes] = self.reservation.allocator.no_page
        given = table, rows, tokens, counts, cut
        cached = self.cached
        with use_mesh(self.model.mesh):
            self.cache, extension, tail = programs.extend(
                *cached, *given, self.traced_policy, shape.one_pass, shape.places
            )
            own = np.where(counts > 0, lanes, num_lanes)
            self.hidden = programs.keep_hidden(self.hidden, extension.hidden, own)
        entries = {
            int(lanes[entry]): (int(entry), int(counts[entry])) for entry in np.flatnonzero(counts)
        }
        added = np.zeros(num_lanes, np.int64)
        added[lanes[counts > 0]] = counts[counts > 0]
        if self.host is not None:
            assert tail is not None
            self.host.write(tail, table)
        self.seen = self.seen + added
        if self._keeps_all:
            self.reservation.add_uniform(added)
        else:
            given = extension.lengths, extension.frozen, added, ends[:-1]
            self.reservation.add_prompts(*given, prompt=batch.prompt)
            _send_to_host((extension.lengths, extension.frozen))
        _send_to_host((extension.live, extension.before))
        all_rows = self.model.config.num_layers * self.model.config.num_kv_heads
        rows = all_rows * shape.one_pass
        return PrefillInFlight(extension, entries, rows, self.policy.shrinks)

    def decode(
        self,
        tokens: Int[np.ndarray | jax.Array, " B"],
        remaining: Int[np.ndarray, " B"],
        rule: Filter | Given,
        *,
        num_steps: int,
        end_tokens: tuple[int, ...],
    ) -> Chunk:
        """Launches C decode steps in one program (pages must be reserved); see `collect`.

        Args:
          tokens: each lane's newest token (int32), not cached yet. A lane is idle if that is an end
            token.
          remaining: number of tokens that each lane may still generate; 0 for an idle lane.
          rule: sampling settings, or the tokens to look up instead of drawing.
          num_steps: number of steps (C).
          end_tokens: token ids that end an answer.
        """
        table, own_table = self.table_of_steps(remaining > 0)
        left = (remaining + programs.ENDLESS * self.endless).astype(np.int32)
        given = table, self.everywhere(tokens), left, self.seeds
        with use_mesh(self.model.mesh):
            self.cache, steps, newest, tail, _ = programs.decode(
                *self.cached, *given, self.traced_policy, rule, num_steps, end_tokens
            )
        _send_to_host(steps)
        most = np.minimum(remaining, num_steps).astype(np.int64)
        self.reservation.add_steps(most)
        return Chunk(
            most=most,
            epochs=self.reservation.epochs,
            tail=tail,
            table=own_table,
            newest=newest,
            results=steps,
            end_tokens=end_tokens,
            endless=self.endless,
        )

    def table_of_steps(
        self, stepping: Bool[np.ndarray, " B"]
    ) -> tuple[jax.Array, Int[np.ndarray, "L B K M"] | None]:
        """Returns the page table of steps on the device, and on the host if values are there.

        Sends only the changed cells, unless they are many or the width has changed.
        """
        table = self.reservation.table(stepping=stepping)
        changes = self.reservation.allocator.take_changes()
        on_device = self._table
        known = on_device is not None and on_device.shape == table.shape
        if changes is None or on_device is None or not (known and sends_changes(table.size)):
            # A copy: pages are released while it runs.
            on_device = jax.device_put(self.everywhere(table.copy()))
            changes = np.zeros((2, 0), np.int64)
        rows, columns = changes[:, changes[1] < table.shape[-1]]
        pages = table.reshape(-1, table.shape[-1])[rows, columns]
        for start in range(0, len(pages), CELLS):
            cells = self.no_cells(table.shape)
            some = np.stack([rows, columns, pages])[:, start : start + CELLS]
            cells[:, : some.shape[1]] = some
            with use_mesh(self.model.mesh):
                on_device = programs.update_table(on_device, cells)
        self._table = on_device
        return on_device, None if self.host is None else table.copy()

    def no_cells(self, shape: tuple[int, ...]) -> Int[np.ndarray, "3 n"]:
        """Returns cells for `programs.update_table` that change nothing."""
        return np.full((3, CELLS), math.prod(shape[:-1]), np.int32)

    def collect(self, program: StepsInFlight) -> Steps:
        """Waits for the oldest program in flight; returns its steps without released lanes."""
        steps, ended = program.read()
        current = program.epochs == self.reservation.epochs
        steps = dataclasses.replace(steps, ran=steps.ran & current)
        counts = steps.ran.sum(0)
        self.reservation.collect_steps(
            steps.lengths,
            steps.frozen,
            ran=counts > 0,
            most=program.most,
            ended=ended,
            current=current,
        )
        self.seen = self.seen + counts
        if self.host is not None:
            assert program.tail is not None
            assert program.table is not None
            self.host.write(program.tail, program.table)
        return steps

    # -- shared prompts ---------------------------------------------------------------------------

    def fork(self, source_of: Mapping[int, int]) -> None:
        """Copies sequences to empty lanes, with the policy's state.

        Pages are copied block by block, one program call per block, within one device only. On a
        GPU a loop of traced length in one program would block the host until the last page is
        copied, and first tokens too.

        Args:
          source_of: lane -> the lane whose sequence it copies, on the same devices.

        Raises:
          CapacityError: the pages are not free; then nothing is copied.
        """
        targets, sources = list(source_of), list(source_of.values())
        lengths = self.reservation.lengths
        extra = np.zeros_like(lengths)
        extra[:, targets] = lengths[:, sources]
        self.reservation.reserve(extra, prompt=True)
        lanes = np.arange(self.num_lanes, dtype=np.int32)
        lanes[targets] = sources
        pairs = self.reservation.allocator.copies(source_of)
        if self.host is not None:  # then there is one shard
            self.host.copy(pairs[0])
        for pages in self._blocks(pairs):
            with use_mesh(self.model.mesh):
                self.cache = programs.copy_lanes(self.cache, pages, lanes, lengths.shape[2])
        self.reservation.copy(source_of)
        self.seen[targets] = self.seen[sources]

    def _blocks(self, pairs: list[Int[np.ndarray, "2 _"]]) -> Iterator[Int[np.ndarray, "s 2 b"]]:
        """Yields (source, target) pages of each shard in blocks, at least one."""
        longest = max(each.shape[1] for each in pairs)
        block = self.no_pages().shape[-1]
        for start in range(0, max(longest, 1), block):
            pages = self.no_pages()
            for shard, each in enumerate(pairs):
                some = each[:, start : start + block]
                pages[shard, :, : some.shape[1]] = some
            yield pages

    def no_pages(self) -> Int[np.ndarray, "shards 2 n"]:
        """Returns a block of `programs.copy_lanes` in which nothing is copied."""
        allocator = self.reservation.allocator
        block = min(max(1, BLOCK_BYTES // self.page_bytes), allocator.pages_per_shard)
        return np.full((self.num_shards, 2, block), allocator.no_page, np.int32)

    def first_tokens(
        self,
        source_of: Mapping[int, int],
        tokens: Int[np.ndarray | jax.Array, " B"],
        rule: Filter | Given,
    ) -> tuple[Array, Steps]:
        """Draws the token after a prompt for some lanes; see `programs.first_tokens`.

        Args:
          source_of: lane -> the lane that prefilled its prompt, itself or another one.
          tokens: the newest token of every lane; other lanes keep it.
          rule: as in `decode`.
        """
        lanes, sources = list(source_of), np.arange(len(tokens), dtype=np.int32)
        sources[lanes] = list(source_of.values())
        fresh = np.zeros(len(tokens), bool)
        fresh[lanes] = True
        with use_mesh(self.model.mesh):
            newest, drawn = programs.first_tokens(
                self.model.transformer.without_layers(),
                self.hidden,
                sources,
                self.seeds,
                self.seen[sources].astype(np.int32),
                rule,
                fresh,
                self.everywhere(tokens),
            )
        _send_to_host(drawn)
        return newest, drawn

    # -- cached prefixes --------------------------------------------------------------------------

    def read_lanes(self, lanes: list[int]) -> dict[int, Any]:
        """Returns the policy's state of the rows of lanes, leaves [L, K, ...], on the device."""
        if not lanes or not jax.tree.leaves(self._cache.row_state):
            return dict.fromkeys(lanes, self._cache.row_state)
        groups = self.copies.grouped(lanes)
        found = [rows for group in groups for rows in programs.read_lanes(self.cache, group)]
        return dict(zip(lanes, found, strict=False))  # the last group may be longer

    def load_lane(
        self,
        lane: int,
        lengths: Int[np.ndarray, "L K"],
        frozen: Int[np.ndarray, "L K"],
        tokens: int,
        rows: Any,
    ) -> None:
        """Sets the state of an empty lane that has the pages of a sequence.

        Args:
          lane: the lane.
          lengths: slots in use of each row.
          frozen: those that are never written again.
          tokens: number of tokens of the sequence.
          rows: the policy's state of each row, from `read_lanes`.
        """
        self.copies.add_load(lane, Load(lengths, tokens, rows))
        self.reservation.set_lengths_of(lane, lengths, frozen)
        self.seen = self.seen.copy()  # a program in flight may use the old array
        self.seen[lane] = tokens

    def copy_pages(self, sources: Int[np.ndarray, " n"], targets: Int[np.ndarray, " n"]) -> None:
        """Copies pages of the pool from source to target."""
        if self.host is not None:
            self.host.copy(np.stack([sources, targets]))
        self.copies.add_pages(sources, targets)

    def read_pages(self, pages: Int[np.ndarray, " n"]) -> Any:
        """Launches a copy of the contents of pages; returns it on the device."""
        return programs.read_pages(self.cache, pages)

    def write_pages(self, pages: Int[np.ndarray, " n"], contents: Any) -> None:
        """Writes the contents of pages, as `read_pages` returns them."""
        self.cache = programs.write_pages(self.cache, pages, contents)
