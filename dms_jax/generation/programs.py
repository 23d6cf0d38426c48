"""The compiled programs of generation: prefill, first tokens, decode, copies of lanes.

A chunk of decode steps is one program, `decode`. With grammars the host checks its tokens, some of
which are drawn again by `redraw` (`checked_steps`).

Each takes the cache as a donated argument and returns it. The page table is a separate read-only
argument, and is not part of the cache between programs. `Program` holds the compiler options of
each platform; `Packed` makes the results of a program one transfer to the host.
"""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array, Bool, Float, Int, Key, UInt32

from dms_jax import compilation, executables, sharding
from dms_jax.cache import Cache
from dms_jax.cache.host_values import HostRows, Tail
from dms_jax.generation.sampling import Filter, Given, likeliest, look_up, sample
from dms_jax.model.caching import (
    cache_shape,
    cache_specs,
    frozen_slots,
    init_cache,
    init_state,
)
from dms_jax.model.transformer import Transformer
from dms_jax.model.unpadded import Unpadded
from dms_jax.policies import Policy

# -- compiler options ------------------------------------------------------------------------------


# XLA may omit a rounding to bfloat16 between two fused operations, and fusion depends on the
# shapes: on a CPU the attention weights of a prompt had 24 or 8 bits, depending on the number of
# prompts. With rounding enforced, all shapes that sum in one order agree exactly.
OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}

# On a GPU XLA's own Triton products are off: they cannot read one layer out of the stacked weights
# in place, so XLA would copy every weight of every layer in every step (7.9 of the 14.3 ms of a
# step with the shape of Llama-3.1-8B). cuBLAS reads them in place.
GPU_OPTIONS: dict[str, Any] = OPTIONS | {"xla_gpu_enable_triton_gemm": False}

# A step's short kernels (plans, what policies keep of a row) may run concurrently with the long
# ones, and copies that XLA would run ahead on separate streams are left in the CUDA graph. Without
# and with concurrency a step with Llama-3.1-8B's shape and 32 sequences over an eighth of 8192
# tokens takes 6.61 and 6.29 ms on an H200. The times here are those of
# `experiments/benchmarks/step_options.py` at commit 72cdb41b.
#
# Loops stay outside of graphs. Unrolled in one graph, a step with Qwen2.5-0.5B's shape and 256
# sequences of 256 tokens takes 1.89 ms instead of 2.04. But a cold engine call and two runs after
# it, 25 s otherwise, had not ended after 50 s. A step allocates next to nothing, so nothing is
# recomputed to save memory. XLA counts a cache that is updated in place three times, and beside a
# large cache would read the gates of a mixture of experts up to three times a step (Qwen3-30B-A3B,
# 64 sequences of 4,096 tokens).
GPU_STEP_OPTIONS: dict[str, Any] = GPU_OPTIONS | {
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_disable_hlo_passes": "dynamic-slice-copy-fusion-async-wrapper,rematerialization",
}

# So each iteration of the loop over layers is one graph. It has several layers: each graph waits
# for the one before it, and the arrays of its layers (norms, plans, tables, rows) are sliced at
# once. With 16 layers instead of 8 a step with Llama-3.2-1B's shape and 32 sequences takes 1.70 ms
# instead of 1.74 on an H100, one with Qwen2.5-0.5B's and 256 sequences 2.25 instead of 2.24.
ON_GPU_STEP: dict[str, Any] = {"block": 16}


# The jax settings that change programs of generation, read at every call. Changing another setting
# takes effect only in programs that are not compiled yet.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_device",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
    "jax_debug_nans",
    "jax_debug_infs",
    "jax_disable_jit",
)


class Program:
    """A jitted function with the compiler options of its platform.

    Programs compiled in advance are called without tracing: see `executables`.

    Args:
      function: the function to compile.
      gpu_options: compiler options on a GPU; elsewhere they are `OPTIONS`.
      on_gpu: keyword arguments passed to the function on a GPU.
      static_argnums: the arguments that are not arrays.
      **options: arguments of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable,
        *,
        gpu_options: dict[str, Any] = GPU_OPTIONS,
        on_gpu: dict[str, Any] | None = None,
        static_argnums: tuple[int, ...] = (),
        **options: Any,
    ):
        functools.update_wrapper(self, function)
        self._static = static_argnums
        options |= {"static_argnums": static_argnums}
        self._anywhere = jax.jit(function, compiler_options=OPTIONS, **options)
        given = functools.partial(function, **(on_gpu or {}))
        self.on_gpu = jax.jit(given, compiler_options=gpu_options, **options)
        self._made_of = (
            function,
            {
                "gpu": gpu_options,
                "other": OPTIONS,
                "on_gpu": on_gpu or {},
                **options,
            },
        )
        self._ready: dict[Any, jax.stages.Compiled] = {}  # by their signature

    @property
    def jitted(self) -> Any:
        """The jitted function for the default device."""
        return self.on_gpu if jax.default_backend() == "gpu" else self._anywhere

    def __call__(self, *args: Any) -> Any:
        if self._ready:
            ready = self._ready.get(self._signature(args))
            if ready is not None:
                return ready(*self._arrays(args))
        return self.jitted(*args)

    def chosen(self, *args: Any) -> Callable:
        """Returns a function for many calls with arguments of one form, which it does not check."""
        ready = self._ready.get(self._signature(args)) if self._ready else None
        return self.jitted if ready is None else lambda *args: ready(*self._arrays(args))

    def lower(self, *args: Any) -> Any:
        """Lowers the function for the arguments; see `jax.jit(f).lower`."""
        return self.jitted.lower(*args)

    def reading(self, *args: Any) -> Callable[[], bool]:
        """Returns a function that reads the executable for these arguments from disk.

        It may be called in another thread, and returns whether the executable is available.
        """
        signature = self._signature(args)
        if signature in self._ready:
            return lambda: True
        key = self._key(signature)
        if key is None:
            return lambda: False
        arrays = self._arrays(args)
        tree, devices = jax.tree.structure((arrays, {})), _devices(arrays)

        def read() -> bool:
            found = executables.read(key, tree, devices)
            if found is not None:
                self._ready[signature] = found
            return found is not None

        return read

    def compiling(self, *args: Any) -> Callable[[], None]:
        """Lowers the function for the arguments; returns a function that compiles it in any thread.

        The executable is kept on disk if that is enabled.
        """
        signature, lowered = self._signature(args), self.lower(*args)
        key = self._key(signature)

        def make() -> None:
            if key is None:
                compiled = lowered.compile()
                if signature is not None:
                    self._ready[signature] = compiled
                return
            with compilation.without_jax_cache():
                compiled, anew = compilation.compile_anew(lowered)
            self._ready[signature] = compiled
            if anew:
                executables.keep(key, compiled)

        return make

    def prepare(self, *args: Any) -> None:
        """Reads or compiles the executable for these arguments."""
        if not self.reading(*args)():
            self.compiling(*args)()

    def _arrays(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(each for number, each in enumerate(args) if number not in self._static)

    def _signature(self, args: tuple[Any, ...]) -> Any:
        """Returns the cache key of a program: shapes, static arguments, jax's settings.

        None inside a trace.
        """
        leaves, tree = jax.tree.flatten(self._arrays(args))
        kinds = tuple(map(_kind, leaves))
        if None in kinds:
            return None
        static = tuple(args[number] for number in self._static)
        return _settings(), static, tree, kinds

    def _key(self, signature: Any) -> str | None:
        if signature is None or executables.directory() is None:
            return None
        return executables.key_of(*self._made_of, signature[1:])


def _settings() -> tuple[Any, ...]:
    """Returns the jax settings that a program depends on; a thread's settings come first."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh, *(getattr(jax.config, name) for name in _SETTINGS)


def _kind(leaf: Any) -> Any:
    """Returns the part of the cache key for one argument; None for a tracer."""
    if isinstance(leaf, np.ndarray):
        return leaf.shape, leaf.dtype, False, None
    if isinstance(leaf, Tracer):
        return None
    if isinstance(leaf, jax.Array):
        # An array committed to the default place counts as uncommitted: results are committed if an
        # argument was (KCache's values on the host).
        place = leaf.sharding if leaf.committed and not _by_default(leaf.sharding) else None
        return leaf.shape, leaf.dtype, leaf.weak_type, _shortest(place)
    return type(leaf)


@functools.cache
def _shortest(place: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    """Returns an equal sharding with the shortest specification.

    A program's results may name mesh axes of size 1, or omit dimensions that are not split.
    """
    if not isinstance(place, NamedSharding):
        return place
    split: list[tuple[str, ...]] = [
        tuple(name for name in sharding.together(over) if place.mesh.shape[name] > 1)
        for over in place.spec
    ]
    while split and not split[-1]:
        split.pop()
    return NamedSharding(place.mesh, PartitionSpec(*split), memory_kind=place.memory_kind)


def _by_default(place: jax.sharding.Sharding) -> bool:
    if not isinstance(place, SingleDeviceSharding):
        return False
    (device,) = place.device_set
    default = jax.config.jax_default_device or jax.devices()[0]
    return device == default and place.memory_kind in (None, device.default_memory().kind)


def _devices(arrays: Any) -> list[jax.Device]:
    """Returns the devices on which a program with these arguments runs, in order."""
    found = [leaf.sharding for leaf in jax.tree.leaves(arrays) if isinstance(leaf, jax.Array)]
    for sharding_of in found:
        if isinstance(sharding_of, NamedSharding) and isinstance(sharding_of.mesh, Mesh):
            return list(sharding_of.mesh.devices.flat)
    return list(found[0].device_set) if found else jax.devices()[:1]


# Added to the number of tokens that a lane may generate if it ignores end tokens. A separate
# argument would be another transfer in every chunk.
ENDLESS = 2**30


# -- transfers -------------------------------------------------------------------------------------


@struct.dataclass
class Packed:
    """A tree of arrays as consecutive 32-bit words: one transfer to the host.

    On a GPU the host needs a transfer for every array, about a millisecond however small it is; a
    chunk of steps has six results, and its lanes wait for them.

    Attributes:
      words: the bits of all arrays; each boolean takes a word.
      tree: structure of the tree.
      leaves: shape and dtype of each array.
    """

    words: Int[Array, " n"]
    tree: Any = struct.field(pytree_node=False)
    leaves: tuple[jax.ShapeDtypeStruct, ...] = struct.field(pytree_node=False)

    @classmethod
    def of(cls, tree: Any) -> "Packed":
        """Packs a tree, inside a program."""
        leaves, structure = jax.tree.flatten(tree)
        shapes = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
        return cls(jnp.concatenate([_words(leaf) for leaf in leaves]), structure, shapes)

    def read(self) -> Any:
        """Waits for the program, and returns the tree with NumPy arrays."""
        words, arrays, start = np.asarray(self.words), [], 0
        for leaf in self.leaves:
            wide = np.dtype(np.int32) if leaf.dtype == bool else np.dtype(leaf.dtype)
            end = start + leaf.size * wide.itemsize // 4
            array = words[start:end].view(wide).reshape(leaf.shape)
            arrays.append(array.astype(leaf.dtype, copy=False))
            start = end
        return jax.tree.unflatten(self.tree, arrays)


def _words(leaf: Array) -> Int[Array, " n"]:
    if leaf.dtype == bool:
        return leaf.astype(jnp.int32).reshape(-1)
    return jax.lax.bitcast_convert_type(leaf, jnp.int32).reshape(-1)


@struct.dataclass
class Steps:
    """The results of C decode steps of B lanes.

    Device arrays in the program, NumPy arrays when they are read. `ran` marks the steps that each
    lane took; `live` and `reads` are totals over its L * K rows. Log-probabilities are None unless
    asked for. `greedy` says whether each given token is the likeliest; None unless tokens are
    given. `finite` says whether the logits were numbers. `likeliest` and `highest`, None unless
    tokens are masked or forced, are the likeliest token and its log-probability. At the end of
    the chunk `lengths` are the slots in use of each row, and `frozen` those that are never written
    again (`frozen_slots`).
    """

    tokens: Any  # Int[C, B]
    logprobs: Any  # Float[C, B] | None
    greedy: Any  # Bool[C, B] | None
    finite: Any  # Bool[C, B]
    likeliest: Any = None  # Int[C, B] | None
    highest: Any = None  # Float[C, B] | None
    ran: Any = None  # Bool[C, B]
    live: Any = None  # Int[C, B]
    reads: Any = None  # Int[C, B]
    lengths: Any = None  # Int[L, B, K]
    frozen: Any = None  # Int[L, B, K] | None


@struct.dataclass
class Extension:
    """The results of a chunk of T given tokens of b entries, on the device until they are read.

    Totals are over the L * K rows of an entry: `before` the chunk, and `live` after each token.
    """

    hidden: Any  # [b, E], of each entry's last token
    before: Any  # Int[b]
    live: Any  # Int[b, T]
    lengths: Any  # Int[L, B, K], slots in use of each row of the cache after it
    frozen: Any = None  # Int[L, B, K] | None, those that are never written again


def bucket(size: int) -> int:
    """Returns the next power of two, to keep the number of compiled shapes small."""
    return 1 << max(size - 1, 0).bit_length()


def request_keys(seeds: UInt32[Array, "B 2"]) -> Key[Array, " B"]:
    """Returns the random key of each lane's request, from its seed and copy number.

    Programs make keys themselves: a separate program would be launched between two chunks, while
    the device is idle.
    """
    return jax.vmap(lambda each: jax.random.fold_in(jax.random.key(each[0]), each[1]))(seeds)


@functools.partial(Program, static_argnums=tuple(range(8)))
def empty_cache(
    config: Any,
    form: jax.tree_util.PyTreeDef,
    num_lanes: int,
    num_pages: int,
    page_size: int,
    dtype: Any,
    kv_dtype: str | None,
    value_pages: int | None,
) -> Cache:
    """Creates an empty cache on the default device.

    Takes only the policy's structure (`jax.tree.structure`): its numbers affect no shape.
    """
    return init_cache(
        config,
        jax.tree.unflatten(form, [0] * form.num_leaves),
        num_sequences=num_lanes,
        num_pages=num_pages,
        page_size=page_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        value_pages=value_pages,
    )


@functools.lru_cache(maxsize=8)
def make_cache(mesh: jax.sharding.Mesh | None, config: Any, *args: Any) -> Callable[[], Cache]:
    """Returns a compiled function that creates an empty cache; see `empty_cache`.

    Args:
      mesh: the current mesh, over whose devices the cache is split.
      config, *args: those of `empty_cache`.
    """
    if mesh is None:
        empty_cache.prepare(config, *args)
        return functools.partial(empty_cache, config, *args)
    make = functools.partial(inspect.unwrap(empty_cache), config, *args)
    specs = cache_specs(jax.eval_shape(make), config.num_kv_heads)
    return jax.jit(make, out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs))


@functools.partial(Program, donate_argnums=0, static_argnums=(2, 4))
def clear(cache: Cache, mask: Bool[Array, " B"], config: Any, policy: Policy, dtype: Any) -> Cache:
    """Empties the masked lanes: lengths and row states. Pages are managed on the host."""
    shape = cache_shape(config, dtype, num_sequences=len(mask))
    fresh = init_state(config, policy, shape).rows

    def reset(old, new):
        return jnp.where(mask.reshape(1, -1, *[1] * (old.ndim - 2)), new, old)

    return dataclasses.replace(
        cache,
        lengths=reset(cache.lengths, 0),
        seen=jnp.where(mask, 0, cache.seen),
        row_state=jax.tree.map(lambda old, new: reset(old, new[None]), cache.row_state, fresh),
    )


@functools.partial(Program, donate_argnums=0)
def set_max_lengths(cache: Cache, max_lengths: Int[Array, " B"]) -> Cache:
    """Sets the maximum length of each lane's sequence."""
    return dataclasses.replace(cache, max_lengths=max_lengths)


def attach_tail(cache: Cache, host: HostRows | None, length: int) -> Cache:
    """Adds a tail for the values of the next `length` tokens if values are in host memory."""
    if host is None:
        return cache
    pool = cache.pool
    tail = Tail.empty(
        cache.page_table.shape[:3],
        length,
        pool.k_pages.shape[-1],
        pool.k_pages.dtype,
        cache.seen,
    )
    return dataclasses.replace(cache, pool=dataclasses.replace(pool, tail=tail))


def detach_tail(cache: Cache) -> tuple[Cache, Tail | None]:
    """Returns the cache without its tail, and the tail, whose values the host must write."""
    tail = cache.pool.tail
    return dataclasses.replace(cache, pool=dataclasses.replace(cache.pool, tail=None)), tail


@Program
def update_table(
    page_table: Int[Array, "L B K M"], cells: Int[Array, "3 n"]
) -> Int[Array, "L B K M"]:
    """Sets cells of a page table: (row, column, page), rows counted over layers, lanes and heads.

    A row beyond the last one is ignored. The given table is not modified: steps in flight read it.
    """
    rows, columns, pages = cells
    flat = page_table.reshape(-1, page_table.shape[-1])
    updated = flat.at[rows, columns].set(pages, mode="drop").reshape(page_table.shape)
    return sharding.constrain(updated, None, None, None, None)


@functools.partial(Program, donate_argnums=1, static_argnums=(9, 10))
def extend(
    transformer: Transformer,
    cache: Cache,
    host: HostRows | None,
    page_table: Int[Array, "L b K M"],
    lanes: Int[Array, " b"] | None,
    tokens: Int[Array, "b T"],
    counts: Int[Array, " b"],
    ends_prompt: Bool[Array, " b"] | None,
    policy: Policy,
    one_pass: bool,
    places: int | None,
) -> tuple[Cache, Extension, Tail | None]:
    """Runs a chunk over some lanes (all if None), and updates their rows in the cache.

    `ends_prompt` and `one_pass` are those of `Transformer.cached`. Products have `places` rows, or
    b * T if None. If lanes are split over devices, so are the entries, each beside its lane.
    """
    split, _ = sharding.row_axes(*cache.lengths.shape[1:])
    num_lanes, own = len(cache.seen), lanes
    if lanes is not None and split is not None:  # lanes are numbered from 0 on every device
        a_device = num_lanes // sharding.axis_size(split)
        own = jnp.where(lanes < num_lanes, lanes % a_device, a_device)

    def on_devices(function, *arrays):
        """Calls a function of arrays by lane or entry [*, B or b, ...] and of the lanes."""
        if split is None:
            return function(*arrays, own)
        rows, line = PartitionSpec(None, split), PartitionSpec(split)
        specs = *(rows for _ in arrays), line
        mapped = jax.shard_map(
            function, in_specs=specs, out_specs=rows, axis_names={split}, check_vma=False
        )
        return mapped(*arrays, own)

    def take(x):
        if lanes is None:
            return x
        return on_devices(lambda x, lanes: x.at[:, lanes].get(mode="clip"), x)

    def put(x, new):
        if lanes is None:
            return new
        return on_devices(lambda x, new, lanes: x.at[:, lanes].set(new, mode="drop"), x, new)

    # An entry that belongs to no lane is an empty sequence: it reads and writes no lane's pages.
    lengths = take(cache.lengths)
    if lanes is not None:
        lengths = jnp.where((lanes < num_lanes)[:, None], lengths, 0)
    some = dataclasses.replace(
        cache,
        page_table=page_table,
        lengths=lengths,
        seen=take(cache.seen[None])[0],
        max_lengths=take(cache.max_lengths[None])[0],
        adapters=jax.tree.map(lambda x: take(x[None])[0], cache.adapters),
        row_state=jax.tree.map(take, cache.row_state),
    )
    some = attach_tail(some, host, tokens.shape[1])
    line = None if places is None else Unpadded.of(counts, tokens.shape[1], places)
    passed = transformer.cached(
        tokens,
        counts,
        some,
        policy,
        one_pass=one_pass,
        ends_prompt=ends_prompt,
        host=host,
        line=line,
    )
    if line is None:
        last = jnp.maximum(counts - 1, 0)[:, None, None]
        hidden = jnp.take_along_axis(passed.hidden, last, axis=1)[:, 0]
    else:
        hidden = passed.hidden[0, line.last]
    after, tail = detach_tail(passed.cache)
    cache = dataclasses.replace(
        after,
        page_table=cache.page_table,
        lengths=put(cache.lengths, after.lengths),
        seen=put(cache.seen[None], after.seen[None])[0],
        max_lengths=cache.max_lengths,
        adapters=cache.adapters,
        row_state=jax.tree.map(put, cache.row_state, after.row_state),
    )
    before = lengths.sum((0, 2), dtype=jnp.int32)
    hidden = sharding.constrain(hidden, None, None)  # as `keep_hidden` is compiled for it
    frozen = _frozen_slots(transformer, policy, cache)
    return cache, Extension(hidden, before, passed.live, cache.lengths, frozen), tail


@functools.partial(Program, donate_argnums=0)
def keep_hidden(
    kept: Float[Array, "B E"], hidden: Float[Array, "b E"], lanes: Int[Array, " b"]
) -> Float[Array, "B E"]:
    """Replaces the hidden states of some lanes; a number beyond the last lane is ignored."""
    return sharding.constrain(kept.at[lanes].set(hidden, mode="drop"), None, None)


@Program
def first_tokens(
    transformer: Transformer,
    hidden: Float[Array, "B E"],
    sources: Int[Array, " B"],
    seeds: UInt32[Array, "B 2"],
    positions: Int[Array, " B"],
    rule: Filter | Given,
    fresh: Bool[Array, " B"],
    tokens: Int[Array, " B"],
) -> tuple[Int[Array, " B"], Steps]:
    """Draws the token after a prompt for the fresh lanes; the other lanes keep theirs.

    Lane b draws from the hidden state of lane `sources[b]`. The results are the newest token of
    each lane, and the fields of `Steps` for the drawn ones [B].
    """
    logits = transformer.unembed(hidden[sources])
    given = rule.tokens[0] if isinstance(rule, Given) else None
    drawn = _next_tokens(logits, request_keys(seeds), positions, rule, given)
    return jnp.where(fresh, drawn.tokens, tokens), drawn


def _next_tokens(
    logits: Float[Array, "B V"],
    keys: Key[Array, " B"],
    positions: Int[Array, " B"],
    rule: Filter | Given,
    given: Int[Array, " B"] | None,
    forced: Int[Array, " B"] | None = None,
) -> Steps:
    """Draws or looks up the next token of each row; returns it with its log-probability."""
    if given is not None:
        return Steps(given, *look_up(logits, given), are_numbers(logits))
    assert isinstance(rule, Filter)
    tokens, logprobs = sample(logits, keys, positions, rule, forced)
    opened = rule.allowed is not None or forced is not None
    best = likeliest(logits) if opened else (None, None)
    return Steps(tokens, logprobs if rule.logprobs else None, None, are_numbers(logits), *best)


def are_numbers(logits: Float[Array, "B V"]) -> Bool[Array, " B"]:
    """Returns whether the largest logit of each row is finite: NaN is larger than any number."""
    return jnp.isfinite(logits.max(-1))


def _split(remaining: Int[Array, " B"]) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Splits `remaining` into the tokens that lanes may generate, and whether they ignore ends."""
    return remaining % ENDLESS, remaining >= ENDLESS


def _ends(tokens: Int[Array, " B"], end_tokens: tuple[int, ...]) -> Bool[Array, " B"]:
    return functools.reduce(
        jnp.logical_or, [tokens == end for end in end_tokens], jnp.zeros(tokens.shape, bool)
    )


@struct.dataclass
class Checks:
    """Marks steps whose tokens the host checks.

    Attributes:
      forced: Int[C, B], tokens that lanes must take (-1: any); None if no lane has an opening.
    """

    forced: Any = None


@struct.dataclass
class Overwritten:
    """Slots that C steps may overwrite, and what they held before."""

    slots: Any  # Int[L, B, K, C], beyond the row if a step overwrites none
    pool: Any  # leaves [L, B, K, C, ...]


@struct.dataclass
class Trail:
    """What the host needs to draw a token of C steps again, and to go on from there.

    Attributes:
      hidden: [C, B, E], what the token of each step was drawn from.
      seen: Int[C, B], the tokens that each lane has seen after each step.
      lengths: Int[C, L, B, K], slots in use of each row then; None if no step is taken back.
      row_state: leaves [C, L, B, K, ...], the policy's state of each row then, likewise.
      overwritten: the `Overwritten` slots; None if the same ones are overwritten again.
    """

    hidden: Any
    seen: Any
    lengths: Any = None
    row_state: Any = None
    overwritten: Any = None


def _trail(cache: Cache, hidden: Float[Array, "B E"], policy: Policy, num_kv_heads: int) -> Trail:
    """Returns the trail of one step, without a step axis, from the cache after it.

    What the host reads is replicated over a mesh; the state of rows keeps its sharding.
    """
    seen, specs = cache.seen, None
    if sharding.has_mesh():
        hidden, seen = (sharding.constrain(x, *[None] * x.ndim) for x in (hidden, seen))
        specs = cache_specs(cache, num_kv_heads)
    if not policy.can_undo:
        return Trail(hidden, seen)
    state = cache.lengths, cache.row_state
    if specs is not None:
        state = jax.lax.with_sharding_constraint(state, (specs.lengths, specs.row_state))
    lengths, rows = state
    return Trail(hidden, seen, lengths, rows)


def _save_overwritten(
    cache: Cache, page_table: Int[Array, "L B K M"], policy: Policy, count: int
) -> tuple[Cache, Overwritten | None]:
    """Returns what the slots hold that the next `count` steps may overwrite, and the cache."""
    slots = policy.overwritten(cache.row_state, cache.seen, count)
    if slots is None:
        return cache, None
    pages, page_size = _pages_of(cache, page_table, slots), cache.k_pages.shape[1]
    pool = jax.tree.map(lambda x: x.at[pages, slots % page_size].get(mode="clip"), cache.pool)
    # Read before the steps write: XLA would copy the pool to read it later.
    whole, pool = jax.lax.optimization_barrier((cache.pool, pool))
    saved: Any = Overwritten(slots, pool)
    return dataclasses.replace(cache, pool=whole), saved


def _pages_of(
    cache: Cache, page_table: Int[Array, "L B K M"], slots: Int[Array, "L B K C"]
) -> Int[Array, "L B K C"]:
    """Returns the page of each slot; an invalid one for a slot beyond the row."""
    num_pages, page_size = cache.k_pages.shape[:2]
    columns = jnp.minimum(slots // page_size, page_table.shape[-1])
    return jnp.take_along_axis(page_table, columns, -1, mode="fill", fill_value=num_pages)


@functools.partial(
    Program,
    gpu_options=GPU_STEP_OPTIONS,
    on_gpu=ON_GPU_STEP,
    donate_argnums=1,
    static_argnums=(9, 10),
)
def decode(
    transformer: Transformer,
    cache: Cache,
    host: HostRows | None,
    page_table: Int[Array, "L B K M"],
    tokens: Int[Array, " B"],
    remaining: Int[Array, " B"],
    seeds: UInt32[Array, "B 2"],
    policy: Policy,
    rule: Filter | Given,
    num_steps: int,
    end_tokens: tuple[int, ...],
    checks: Checks | None = None,
    *,
    block: int = 1,
) -> tuple[Cache, Packed, Int[Array, " B"], Tail | None, Trail | None]:
    """Adds up to `remaining[b]` tokens per lane in `num_steps` steps; see `Runner.decode`.

    `ENDLESS` is added to `remaining` of a lane whose answer goes on after end tokens. `checks` is
    given if the host checks the tokens (`checked_steps`).

    The results are the cache, the `Steps`, the newest token of each lane, the tail, and, if the
    host checks the tokens, their trail.
    """
    keys = request_keys(seeds)

    def step(carry, chosen):
        cache, tokens, remaining = carry
        given, forced = chosen
        active = remaining > 0
        passed = transformer.cached(
            tokens[:, None],
            active.astype(jnp.int32),
            cache,
            policy,
            one_pass=False,
            host=host,
            block=block,
        )
        hidden = passed.hidden[:, 0]
        with jax.named_scope("sample"):
            logits = transformer.unembed(hidden)
            drawn = _next_tokens(logits, keys, passed.cache.seen, rule, given, forced)
        new = jnp.where(active, drawn.tokens, tokens)
        ended = _ends(new, end_tokens) & ~endless
        remaining = jnp.where(ended, 0, remaining - active)
        out = dataclasses.replace(
            drawn,
            tokens=new,
            ran=active,
            live=passed.live[:, 0],
            reads=passed.reads[:, 0],
        )
        trail = None
        if checks is not None:
            trail = _trail(passed.cache, hidden, policy, transformer.config.num_kv_heads)
        return (passed.cache, new, remaining), (out, trail)

    # The token after a prompt may have ended its request, and the host does not know it yet.
    remaining, endless = _split(remaining)
    remaining = jnp.where(_ends(tokens, end_tokens) & ~endless, 0, remaining)
    table_before, overwritten = cache.page_table, None
    if checks is not None and num_steps > 1:
        cache, overwritten = _save_overwritten(cache, page_table, policy, num_steps)
    cache = attach_tail(dataclasses.replace(cache, page_table=page_table), host, num_steps)
    carry = (cache, tokens, remaining)
    given = rule.tokens if isinstance(rule, Given) else None
    chosen = given, None if checks is None else checks.forced
    (cache, newest, _), (steps, trail) = jax.lax.scan(step, carry, chosen, length=num_steps)
    cache, tail = detach_tail(cache)
    frozen = _frozen_slots(transformer, policy, cache)
    steps = Packed.of(dataclasses.replace(steps, lengths=cache.lengths, frozen=frozen))
    cache = dataclasses.replace(cache, page_table=table_before)
    if trail is not None:
        trail = dataclasses.replace(trail, overwritten=overwritten)
    return cache, steps, newest, tail, trail


def _frozen_slots(transformer: Transformer, policy: Policy, cache: Cache) -> Array | None:
    """Returns `frozen_slots` of the cache; None on a mesh, where no prefixes are kept."""
    return None if sharding.has_mesh() else frozen_slots(transformer.config, policy, cache)


@functools.partial(Program, donate_argnums=1)
def redraw(
    transformer: Transformer,
    cache: Cache,
    page_table: Int[Array, "L B K M"] | None,
    trail: Trail,
    later: Trail | None,
    tokens: Int[Array, " B"],
    refused: Int[Array, "3 n"],
    masks: Int[Array, "n words"],
    seeds: UInt32[Array, "B 2"],
    rule: Filter,
) -> tuple[Cache, Packed, Int[Array, " B"]]:
    """Draws tokens of some lanes again, among the allowed ones, and takes later steps back.

    Args:
      transformer: the weights, without layers.
      cache: the cache, after all steps.
      page_table: as in `decode`; None if no slots were overwritten.
      trail: that of the steps with the tokens.
      later: that of the steps launched after those, any other one if there are none; None if no
        slots were overwritten.
      tokens: the newest tokens of all lanes.
      refused: the lane and the step of each token, and whether there are later steps. A lane beyond
        the last one is ignored.
      masks: see `Filter.allowed`.
      seeds, rule: as in `decode`.

    Returns:
      The cache; packed, the tokens [n], their log-probabilities, if asked for, and the lengths of
      the lanes' rows [L, n, K]; and the newest tokens.
    """
    lanes, steps, follows = refused

    def take(x):
        return x.at[lanes].get(mode="clip") if jnp.ndim(x) else x

    def drawn_from(x):
        return x.at[steps, lanes].get(mode="clip")

    # Independent of the first draw: else tokens near a refused one would be drawn more often.
    keys = jax.vmap(jax.random.fold_in, (0, None))(request_keys(take(seeds)), 1)
    rule = dataclasses.replace(jax.tree.map(take, rule), allowed=masks)
    logits = transformer.unembed(drawn_from(trail.hidden))
    drawn, logprobs = sample(logits, keys, drawn_from(trail.seen), rule)
    newest = tokens.at[lanes].set(drawn, mode="drop")
    kept, followed = (
        jnp.full(len(tokens), -1).at[lanes].set(each, mode="drop") for each in (steps, follows)
    )
    cache = _taken_back(cache, page_table, trail, later, kept, followed > 0)
    lengths = cache.lengths.at[:, lanes].get(mode="clip")
    found = Packed.of((drawn, logprobs if rule.logprobs else None, lengths))
    words = sharding.constrain(found.words, None)
    return cache, dataclasses.replace(found, words=words), newest


def _taken_back(
    cache: Cache,
    page_table: Int[Array, "L B K M"] | None,
    trail: Trail,
    later: Trail | None,
    kept: Int[Array, " B"],
    followed: Bool[Array, " B"],
) -> Cache:
    """Returns the cache with lanes as after step `kept[b]` of a trail; others have -1."""
    if trail.lengths is None:
        return cache

    def choose(after, now):
        """Of the states [C, ?, B, ...] after each step the one of each lane, or the one of now."""
        for step, one in enumerate(after):
            now = jnp.where((kept == step).reshape(1, -1, *[1] * (now.ndim - 2)), one, now)
        return now

    pool, page_size = cache.pool, cache.k_pages.shape[1]
    if trail.overwritten is not None:
        assert page_table is not None
        assert later is not None
        # What two steps have overwritten is first as the second one found it, then as the first.
        step = jnp.arange(len(trail.seen))
        back = (kept >= 0)[:, None] & (step > kept[:, None])
        for old, which in ((later, jnp.broadcast_to(followed[:, None], back.shape)), (trail, back)):
            slots = old.overwritten.slots
            pages = _pages_of(cache, page_table, slots)
            pages = jnp.where(which[:, None], pages, len(cache.k_pages))
            pool = jax.tree.map(
                lambda x, old, pages=pages, slots=slots: x.at[pages, slots % page_size].set(
                    old, mode="drop"
                ),
                pool,
                old.overwritten.pool,
            )
    return dataclasses.replace(
        cache,
        pool=pool,
        lengths=choose(trail.lengths, cache.lengths),
        seen=choose(trail.seen[:, None], cache.seen[None])[0],
        row_state=jax.tree.map(choose, trail.row_state, cache.row_state),
    )


@functools.partial(Program, donate_argnums=0, static_argnums=(3,))
def copy_lanes(
    cache: Cache,
    pages: Int[Array, "shards 2 n"],
    lanes: Int[Array, " B"],
    num_kv_heads: int,
) -> Cache:
    """Copies pages, and the state of `lanes[b]` to each lane b.

    Args:
      cache: the cache.
      pages: (source, target) pages of each shard; an invalid target is skipped.
      lanes: the lane that each lane copies, itself for most.
      num_kv_heads: KV heads of the model.
    """
    if not sharding.has_mesh():
        return _copy_shard(cache, pages, lanes)
    data, model = sharding.row_axes(len(lanes), num_kv_heads)
    if data is not None:  # lanes are numbered from 0 on every device
        lanes = lanes % (len(lanes) // sharding.axis_size(data))
    specs = cache_specs(cache, num_kv_heads)
    shards = sharding.cache_spec(("pages",), data, model)
    mapped = jax.shard_map(
        _copy_shard,
        in_specs=(specs, shards, PartitionSpec(data)),
        out_specs=specs,
        check_vma=False,
    )
    return mapped(cache, pages, lanes)


def _copy_shard(cache: Cache, pages: Int[Array, "1 2 n"], lanes: Int[Array, " b"]) -> Cache:
    def take(x):
        return x.at[:, lanes].get(mode="clip")

    return dataclasses.replace(
        _copy_pages(cache, pages[0]),
        lengths=take(cache.lengths),
        seen=take(cache.seen[None])[0],
        row_state=jax.tree.map(take, cache.row_state),
    )


def _copy_pages(cache: Cache, pages: Int[Array, "2 n"]) -> Cache:
    source, target = pages

    def copy(x):
        if not x.size:  # no values on the device
            return x
        # Read before written: in one fusion, a GPU would copy the whole pool for one of them.
        moved = jax.lax.optimization_barrier(x.at[source].get(mode="clip"))
        return x.at[target].set(moved, mode="drop")

    pool, page_state = jax.tree.map(copy, (cache.pool, cache.page_state))
    return dataclasses.replace(cache, pool=pool, page_state=page_state)


# -- cached prefixes -------------------------------------------------------------------------------


@functools.partial(Program, donate_argnums=0)
def copy_pages(cache: Cache, pages: Int[Array, "2 n"]) -> Cache:
    """Copies pages, (source, target); an invalid target is not written."""
    return _copy_pages(cache, pages)


@Program
def read_lanes(cache: Cache, lanes: Int[Array, " n"]) -> tuple[Any, ...]:
    """Returns the policy's state of each row of some lanes, leaves [L, K, ...] for each lane."""
    found = jax.tree.map(lambda x: x.at[:, lanes].get(mode="clip"), cache.row_state)
    return tuple(jax.tree.map(lambda x, n=n: x[:, n], found) for n in range(len(lanes)))


@functools.partial(Program, donate_argnums=0)
def load_lanes(
    cache: Cache,
    lanes: Int[Array, " n"],
    lengths: Int[Array, "n L K"],
    seen: Int[Array, " n"],
    rows: tuple[Any, ...],
) -> Cache:
    """Sets the lengths of lanes' rows, the tokens that they have seen, and the policy's state.

    A number beyond the last lane is ignored. `rows` are as `read_lanes` returns them.
    """

    def write(x, *new):
        return x.at[:, lanes].set(jnp.stack(new, 1), mode="drop")

    return dataclasses.replace(
        cache,
        lengths=cache.lengths.at[:, lanes].set(jnp.swapaxes(lengths, 0, 1), mode="drop"),
        seen=cache.seen.at[lanes].set(seen, mode="drop"),
        row_state=jax.tree.map(write, cache.row_state, *rows),
    )


@Program
def read_pages(cache: Cache, pages: Int[Array, " n"]) -> Any:
    """Returns the contents of pages, leaves [n, ...]; arbitrary for an invalid page number."""
    stored = cache.pool, cache.page_state
    return jax.tree.map(lambda x: x.at[pages].get(mode="clip"), stored)


@functools.partial(Program, donate_argnums=0)
def write_pages(cache: Cache, pages: Int[Array, " n"], contents: Any) -> Cache:
    """Writes the contents of pages; an invalid page number is skipped."""

    def write(x, new):
        return x.at[pages].set(new, mode="drop")

    pool, page_state = jax.tree.map(write, (cache.pool, cache.page_state), contents)
    return dataclasses.replace(cache, pool=pool, page_state=page_state)
