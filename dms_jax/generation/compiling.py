"""How the programs of generation are compiled on each platform."""

import functools
from collections.abc import Callable
from typing import Any

import jax

# XLA may leave out a rounding to bfloat16 between two operations that it fuses, and what it fuses
# depends on the shapes: on a CPU the attention weights of a prompt had 24 or 8 bits, depending on
# the number of prompts. With rounding enforced, all shapes that sum in one order agree exactly.
OPTIONS: dict[str, Any] = {"xla_allow_excess_precision": False}

# On a GPU XLA's own Triton products are off: they cannot read one layer out of the stacked weights
# in place, so XLA would copy every weight of every layer in every step (7.9 of the 14.3 ms of a
# step with the shape of Llama-3.1-8B). cuBLAS reads them in place.
GPU_OPTIONS: dict[str, Any] = OPTIONS | {"xla_gpu_enable_triton_gemm": False}

# A step's short kernels (plans, what policies keep of a row) may run concurrently with the long
# ones, and copies that XLA would run ahead on separate streams are left in the CUDA graph. Without
# and with concurrency a step with Llama-3.1-8B's shape and 32 sequences over an eighth of 8192
# tokens takes 6.61 and 6.29 ms on an H200 (`experiments/results/decode/step_options.json`).
#
# Loops stay outside of graphs. Unrolled in one, a step with Qwen2.5-0.5B's shape and 256 sequences
# of 256 tokens takes 1.89 ms in place of 2.04 (`experiments/results/engine/step_options.json`). But
# a cold call of the engine and two runs after it, 25 s otherwise, had then not ended after 50.
GPU_STEP_OPTIONS: dict[str, Any] = GPU_OPTIONS | {
    "xla_gpu_command_buffer_scheduling_mode": "CONCURRENT",
    "xla_disable_hlo_passes": "dynamic-slice-copy-fusion-async-wrapper",
}

# So a turn of the loop over layers is a graph. It has several layers: each graph waits for the one
# before it, and what its layers have of their own (norms, plans, tables, rows) is sliced at once.
# With 16 in place of 8 a step with Llama-3.2-1B's shape and 32 sequences takes 1.70 ms in place of
# 1.74 on an H100, one with Qwen2.5-0.5B's and 256 sequences 2.25 in place of 2.24
# (`experiments/results/engine/layers_a_turn.json`).
ON_GPU_STEP: dict[str, Any] = {"block": 16}


class Program:
    """A jitted function with the compiler options of the platform that it runs on.

    Args:
      function: the function to compile.
      gpu_options: compiler options on a GPU.
      other_options: compiler options on other platforms.
      on_gpu: keyword arguments that the function is given on a GPU.
      **options: arguments of `jax.jit`.
    """

    def __init__(
        self,
        function: Callable,
        *,
        gpu_options: dict[str, Any] = GPU_OPTIONS,
        other_options: dict[str, Any] = OPTIONS,
        on_gpu: dict[str, Any] | None = None,
        **options: Any,
    ):
        functools.update_wrapper(self, function)
        self._anywhere = jax.jit(function, compiler_options=other_options, **options)
        given = functools.partial(function, **(on_gpu or {}))
        self.on_gpu = jax.jit(given, compiler_options=gpu_options, **options)

    @property
    def jitted(self) -> Any:
        """The jitted function for the default device."""
        return self.on_gpu if jax.default_backend() == "gpu" else self._anywhere

    def __call__(self, *args: Any) -> Any:
        return self.jitted(*args)

    def lower(self, *args: Any) -> Any:
        """Lowers the function for the arguments; see `jax.jit(f).lower`."""
        return self.jitted.lower(*args)
