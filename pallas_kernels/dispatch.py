"""Choose which implementation of an operation serves a call.

An operation (decode attention, training attention, ...) has several implementations, each for one
platform. The choice is made when a function is *lowered*, not when it is traced: planning for a
TPU on a laptop plans the TPU's kernel. Shapes and dtypes are known while tracing, so an
implementation that cannot serve them is left out then, with its reason; the platform is settled by
`jax.lax.platform_dependent` at lowering.

    operation = Operation("decode_attention", (
        Implementation("mosaic_gpu", "cuda", run_mosaic, why_mosaic_cannot),
        Implementation("mosaic_tpu", "tpu", run_tpu, why_tpu_cannot),
        Implementation("xla", None, run_xla),
    ))
    operation(implementation, *arrays, **static)
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

# A name, several names tried in order, or None for the best that serves.
ImplementationChoice = str | Sequence[str] | None


def _serves_everything(*arrays: Any, **static: Any) -> str | None:
    del arrays, static
    return None


def deferred(module: str, name: str) -> Callable[..., Any]:
    """Name a function whose module is imported when it is first called.

    Pallas for GPUs and for TPUs takes as long to import as jax itself.
    """

    def call(*arrays, **static):
        return getattr(importlib.import_module(module), name)(*arrays, **static)

    return call


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
      name: what a caller passes as `implementation`.
      platform: the XLA platform it runs on ("cuda", "tpu"), or None for every platform.
      function: called as `function(*arrays, **static)`.
      why_not: called with the same arguments while tracing; returns None where the implementation
        can serve the call, else the reason it cannot, in words a caller can act on.
    """

    name: str
    platform: str | None
    function: Callable[..., Any]
    why_not: Callable[..., str | None] = _serves_everything


@dataclass(frozen=True)
class Operation:
    """An operation and its implementations, in order of preference."""

    name: str
    implementations: tuple[Implementation, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The names a caller may ask for."""
        return tuple(candidate.name for candidate in self.implementations)

    def candidates(self, choice: ImplementationChoice) -> tuple[Implementation, ...]:
        """List the implementations a choice allows, in the order they are tried.

        Raises:
          ValueError: a name is unknown, or the choice is empty.
        """
        if choice is None:
            return self.implementations
        asked = (choice,) if isinstance(choice, str) else tuple(choice)
        by_name = {candidate.name: candidate for candidate in self.implementations}
        unknown = [name for name in asked if name not in by_name]
        if unknown or not asked:
            raise ValueError(
                f"{self.name}: implementation={choice!r} names {unknown or 'nothing'}; "
                f"known implementations are {', '.join(self.names)}"
            )
        return tuple(by_name[name] for name in asked)

    def select(
        self, choice: ImplementationChoice, *arrays: Any, **static: Any
    ) -> tuple[dict[str | None, Implementation], list[str]]:
        """For each platform the first allowed implementation that can serve these arguments.

        Returns:
          A mapping from platform (None for every other platform) to the implementation, and the
          reasons of those that were left out, one line each.

        Raises:
          NotImplementedError: no allowed implementation can serve the call on any platform.
        """
        chosen: dict[str | None, Implementation] = {}
        reasons = []
        for candidate in self.candidates(choice):
            if candidate.platform in chosen or None in chosen:
                continue
            reason = candidate.why_not(*arrays, **static)
            if reason is None:
                chosen[candidate.platform] = candidate
            else:
                reasons.append(f"{candidate.name}: {reason}")
        if not chosen:
            raise NotImplementedError(
                f"{self.name}: no implementation can serve this call\n  " + "\n  ".join(reasons)
            )
        return chosen, reasons

    def __call__(self, choice: ImplementationChoice, *arrays: Any, **static: Any) -> Any:
        """Run the operation with the implementation of the platform it is lowered for.

        Raises:
          ValueError: unknown implementation name.
          NotImplementedError: nothing allowed serves the arguments (while tracing) or the platform
            (while lowering).
        """
        chosen, reasons = self.select(choice, *arrays, **static)
        bound = {}
        for platform, candidate in chosen.items():
            function = functools.partial(candidate.function, **static)
            bound[platform] = function if platform is None else _in_32_bits(function)
        default = bound.pop(None, None)
        if default is not None and not bound:
            return default(*arrays)
        if default is None:
            served = ", ".join(f"{chosen[p].name} ({p})" for p in bound)
            text = "\n  ".join([f"{self.name}: only {served} may serve this call", *reasons])
            default = functools.partial(_refuse, next(iter(bound.values())), text)
        return jax.lax.platform_dependent(*arrays, default=default, **bound)


def _in_32_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Trace a kernel with 32-bit indices and constants, even where 64 bits are switched on.

    Kernels of every platform are traced on every machine, so they must not disturb a program in
    float64 that none of them will serve.
    """

    def narrow(*arrays):
        with jax.enable_x64(False):
            return function(*arrays)

    return narrow


# An equation that stands for "not on this platform": it has the shapes of the result, and lowering
# it (which happens only on a platform that no allowed implementation serves) raises.
_refuse_p = Primitive("refuse_platform")
_refuse_p.multiple_results = True


@_refuse_p.def_abstract_eval
def _refuse_abstract(*arrays, results, text):
    del arrays, text
    return list(results)


def _refuse_now(*arrays, results, text):
    del arrays, results
    raise NotImplementedError(f"{text}\nand this runs on {jax.default_backend()}")


def _refuse_lowering(context, *arrays, results, text):
    del arrays, results
    platforms = context.platforms or context.module_context.platforms
    raise NotImplementedError(f"{text}\nand this is lowered for {', '.join(platforms)}")


_refuse_p.def_impl(_refuse_now)
mlir.register_lowering(_refuse_p, _refuse_lowering)


def _refuse(like: Callable[..., Any], text: str, *arrays: Any) -> Any:
    shapes = jax.eval_shape(like, *arrays)
    leaves, tree = jax.tree.flatten(shapes)
    results = tuple(ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves)
    flat = jax.tree.leaves(arrays)
    return jax.tree.unflatten(tree, _refuse_p.bind(*flat, results=results, text=text))


@dataclass(frozen=True)
class GPU:
    """The GPU that code is planned for.

    Attributes:
      kind: the device kind, as jax names it.
      cores: streaming multiprocessors.
      capability: compute capability, (9, 0) for Hopper.
    """

    kind: str
    cores: int
    capability: tuple[int, int]


# What is planned for where no GPU is in sight.
DEFAULT_GPU = GPU("NVIDIA H200", 132, (9, 0))


@functools.cache
def _local_gpu() -> GPU | None:
    try:
        device = jax.local_devices(backend="cuda")[0]
    except RuntimeError:
        return None
    major, _, minor = str(device.compute_capability).partition(".")
    return GPU(device.device_kind, device.core_count, (int(major), int(minor or 0)))


def target_gpu() -> GPU:
    """Return the local GPU if there is one, else the H200 that defaults are tuned for."""
    return _local_gpu() or DEFAULT_GPU


def triton_lacks(gpu: GPU, *arrays: Any) -> str | None:
    """What Pallas's Triton backend lacks to read or write arrays on a GPU, or None."""
    if gpu.capability < (8, 0):
        return f"needs compute capability 8.0 (Ampere), {gpu.kind} has {gpu.capability}"
    for array in arrays:
        size, itemsize = array.size, array.dtype.itemsize
        if itemsize == 1 and gpu.capability < (8, 9):
            return f"float8 needs compute capability 8.9 (Ada), {gpu.kind} has {gpu.capability}"
        # Pallas counts numbers in 32 bits, one of them the sign, in arrays of up to 2^32 bytes.
        if 2**31 < size <= 2**32 // itemsize:
            return f"cannot address {size} float8 numbers: at most 2^31, or more than 2^32"
    return None
