"""Chooses the implementation of an operation for a call.

An operation (decode attention, training attention, ...) has several implementations, each for one
platform. The choice is made when a function is *lowered*, not when it is traced: a program lowered
for a TPU on a laptop has the TPU's kernel. Shapes and dtypes are known while tracing, so an
implementation that does not support them is excluded then, with a reason; the platform is known to
`jax.lax.platform_dependent` at lowering. That traces every branch. If the platform-independent
implementation gives the shapes of the results, kernels are wrapped in a primitive and traced only
when lowered, so that no platform pays for the kernels of others.

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
from jax.core import ShapedArray, Tracer
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


def _serves_everything(*arrays: Any, **static: Any) -> str | None:
    del arrays, static
    return None


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    Attributes:
      name: its name as the argument `implementation`.
      platform: the XLA platform that it runs on ("cuda", "tpu"), or None for every platform.
      function: called as `function(*arrays, **static)`; arrays may be pytrees of arrays.
      why_not: called with the same arguments while tracing; returns None if the implementation can
        serve the call, otherwise the reason, in words that help the caller.
    """

    name: str
    platform: str | None
    function: Callable[..., Any]
    why_not: Callable[..., str | None] = _serves_everything


def deferred(name: str, platform: str, module: str, function: str) -> Implementation:
    """Returns an implementation whose module is imported on first use.

    Pallas for GPUs and for TPUs takes as long to import as jax.

    Args:
      name: see `Implementation`.
      platform: see `Implementation`.
      module: full name of the module with the function and its `why_not`.
      function: name of the function in the module.
    """

    def attribute(attribute_name):
        def call(*arrays, **static):
            return getattr(importlib.import_module(module), attribute_name)(*arrays, **static)

        return call

    return Implementation(name, platform, attribute(function), attribute("why_not"))


@dataclass(frozen=True)
class Operation:
    """An operation and its implementations, in order of preference."""

    name: str
    implementations: tuple[Implementation, ...]

    def xla_alone(self, choice: str | None, why: str) -> str:
        """Returns "xla" for a call that no kernel supports yet.

        Raises:
          NotImplementedError: another implementation is chosen.
        """
        if choice not in (None, "xla"):
            raise NotImplementedError(f"{self.name}: {why} is served by xla alone, not {choice!r}")
        return "xla"

    def select(
        self, choice: str | None, *arrays: Any, **static: Any
    ) -> tuple[dict[str | None, Implementation], list[str]]:
        """Returns for each platform the first allowed implementation that can serve the arguments.

        Args:
          choice: the only allowed name; None allows all.
          *arrays: arguments of the implementations.
          **static: static arguments of the implementations.

        Returns:
          A mapping from platform (None for every other platform) to the implementation, and the
          reasons for excluding others, one line each.

        Raises:
          ValueError: the name is unknown.
          NotImplementedError: no allowed implementation can serve the call on any platform.
        """
        allowed = [each for each in self.implementations if choice in (None, each.name)]
        if not allowed:
            known = ", ".join(each.name for each in self.implementations)
            raise ValueError(f"{self.name} has no implementation {choice!r}; it has {known}")
        chosen: dict[str | None, Implementation] = {}
        reasons = []
        for candidate in allowed:
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

    def __call__(self, choice: str | None, *arrays: Any, **static: Any) -> Any:
        """Runs the operation with the implementation for the platform of the lowering.

        Raises:
          ValueError: an implementation name is unknown.
          NotImplementedError: no allowed implementation can serve the arguments (raised while
            tracing) or the platform (raised while lowering).
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
        elif any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arrays)):
            default, bound = _trace_default(default, bound, arrays)
        return jax.lax.platform_dependent(*arrays, default=default, **bound)


def _in_32_bits(function: Callable[..., Any]) -> Callable[..., Any]:
    """Traces a kernel with 32-bit indices and constants, even where 64 bits are enabled.

    Kernels of every platform are traced on every machine, so they must not break a float64 program
    that uses none of them.
    """

    def narrow(*arrays):
        with jax.enable_x64(False):
            return function(*arrays)

    return narrow


# A kernel that is traced at lowering; derivatives and batching trace it at once.
_kernel_p = Primitive("kernel_of_a_platform")
_kernel_p.multiple_results = True


@_kernel_p.def_abstract_eval
def _kernel_abstract(*arrays, function, results):
    del arrays, function
    return list(results)


def _kernel_derivative(primals, tangents, *, function, results):
    del results
    return jax.jvp(function, primals, tuple(map(ad.instantiate_zeros, tangents)))


def _kernel_batched(arrays, axes, *, function, results):
    del results
    batched = jax.vmap(function, in_axes=tuple(axes))(*arrays)
    return batched, [0] * len(batched)


def _kernel_lowering(context, *arrays, function, results):
    del results
    return mlir.lower_fun(function, multiple_results=True)(context, *arrays)


ad.primitive_jvps[_kernel_p] = _kernel_derivative
batching.primitive_batchers[_kernel_p] = _kernel_batched
mlir.register_lowering(_kernel_p, _kernel_lowering)


def _trace_default(
    default: Callable[..., Any], kernels: dict[str, Callable[..., Any]], arrays: Sequence[Any]
) -> tuple[Callable[..., Any], dict[str, Callable[..., Any]]]:
    """Returns the functions with `default` traced, and the kernels as primitives of its results."""
    jaxpr, shapes = jax.make_jaxpr(default, return_shape=True)(*arrays)
    given, returned = jax.tree.structure(tuple(arrays)), jax.tree.structure(shapes)

    def late(kernel):
        def flat(*leaves):
            return jax.tree.leaves(kernel(*jax.tree.unflatten(given, leaves)))

        def call(*arrays):
            leaves = jax.tree.leaves(arrays)
            results = _kernel_p.bind(*leaves, function=flat, results=tuple(jaxpr.out_avals))
            return jax.tree.unflatten(returned, results)

        return call

    def traced(*arrays):
        return jax.tree.unflatten(returned, jaxpr_as_fun(jaxpr)(*jax.tree.leaves(arrays)))

    return traced, {platform: late(kernel) for platform, kernel in kernels.items()}


# A primitive that means "not on this platform": it has the shapes of the result, and lowering it
# raises. It is lowered only on platforms without an allowed implementation.
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
    """The GPU that a kernel is planned for.

    Attributes:
      kind: the device kind, as jax names it.
      cores: the number of streaming multiprocessors.
      capability: the compute capability, (9, 0) for Hopper.
    """

    kind: str
    cores: int
    capability: tuple[int, int]

    @property
    def measured_as(self) -> tuple[str, ...]:
        """Kinds whose measured settings it uses: its own, then its architecture's default.

        On an H100, whose memory is slower than an H200's, the H200's settings of the decode kernel
        are as fast as the best ones (`tuned`).
        """
        related = self.capability == DEFAULT_GPU.capability and self.kind != DEFAULT_GPU.kind
        return (self.kind, DEFAULT_GPU.kind) if related else (self.kind,)

    @property
    def shared_bytes(self) -> int:
        """The most shared memory of a program, by compute capability (CUDA's programming guide)."""
        if self.capability in ((8, 0), (8, 7)):
            return 163 * 1024
        return (227 if self.capability[0] in (9, 10, 11) else 99) * 1024

    def programs_a_core(self, shared_bytes: int) -> int:
        """Returns the number of programs with this much shared memory that fit a core.

        A core has 1 KB more than one program can have, and each program takes 1 KB in addition.
        """
        return (self.shared_bytes + 1024) // (shared_bytes + 1024)


# The GPU for planning kernels without a local GPU.
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
    """Returns the local GPU, or else the H200, for which the defaults are tuned."""
    return _local_gpu() or DEFAULT_GPU


def not_hopper() -> str | None:
    """Returns why kernels for Hopper cannot run on this machine's GPU, or None."""
    gpu = target_gpu()
    if gpu.capability != (9, 0):
        return f"needs compute capability 9.0 (Hopper), {gpu.kind} has {gpu.capability}"
    return None


def mosaic_lacks(gpu: GPU) -> str | None:
    """Returns why kernels of plain loads, stores and `mma` cannot run on a GPU, or None."""
    if gpu.capability < (8, 0):
        return f"needs compute capability 8.0 (Ampere), {gpu.kind} has {gpu.capability}"
    return None
