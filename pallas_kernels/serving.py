"""The implementation that serves an attention call on this machine, and reasons against others."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode.api import OPERATION as DECODE
from pallas_kernels.decode.rows import Rows
from pallas_kernels.dispatch import Operation, target_gpu
from pallas_kernels.training.api import FORWARD
from pallas_kernels.training.inputs import Inputs

ROWS, COLUMNS, LENGTH = 8, 4, 256  # no implementation depends on them


@dataclasses.dataclass(frozen=True)
class Served:
    """The implementation that serves an operation.

    Attributes:
      operation: "decoding" or "training".
      implementation: its name, as for `implementation=`.
      reasons: why preferred implementations for this platform cannot serve it.
    """

    operation: str
    implementation: str
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        why = f" ({'; '.join(self.reasons)})" if self.reasons else ""
        return f"{self.operation}: {self.implementation}{why}"


def serving(
    *,
    head_dim: int = 128,
    group: int = 4,
    page_size: int = 64,
    dtype: Any = jnp.bfloat16,
    pages_dtype: Any = None,
    platform: str | None = None,
) -> tuple[Served, ...]:
    """Returns the implementations for decoding and training of a model of this shape.

    Args:
      head_dim: D.
      group: G, query heads per KV head.
      page_size: P.
      dtype: dtype of queries, keys and values.
      pages_dtype: dtype of the pages if different: float8_e4m3fn.
      platform: "cpu", "cuda" or "tpu"; by default this process's. Without a local GPU, "cuda" means
        an H200.
    """
    here = {"gpu": "cuda"}.get(jax.default_backend(), jax.default_backend())

    def array(*shape: int, dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    stored = jnp.dtype(dtype if pages_dtype is None else pages_dtype)
    in_page = (ROWS * COLUMNS, page_size)
    pages = array(*in_page, head_dim, dtype=stored)
    scales = None
    if stored.itemsize == 1:
        scales = array(*in_page, dtype=jnp.float32)
    table, lengths = (array(*shape, dtype=jnp.int32) for shape in ((ROWS, COLUMNS), (ROWS,)))
    rows = Rows(pages, pages, table, lengths, scales, scales)
    decode = (array(ROWS, group, head_dim), rows, None)
    keys = array(1, LENGTH, 1, head_dim)
    train = Inputs(array(1, LENGTH, group, head_dim), keys, keys, array(1, 1, LENGTH), None)
    static = dict(scale=head_dim**-0.5, return_lse=False, return_scores=False)
    return (
        _served("decoding", DECODE, platform or here, decode, static),
        _served("training", FORWARD, platform or here, (train,), dict(window=64, scale=1.0)),
    )


def _served(
    name: str, operation: Operation, platform: str, arrays: tuple, static: dict[str, Any]
) -> Served:
    chosen, reasons = operation.select(None, *arrays, **static)
    served = chosen.get(platform) or chosen[None]
    preferred = [each.name for each in operation.implementations if each.platform == platform]
    if not preferred:
        reasons = [f"no kernel is for {platform}"]
    else:
        first = preferred[: preferred.index(served.name)] if served.name in preferred else preferred
        reasons = [reason for reason in reasons if reason.partition(":")[0] in first]
    if platform == "cuda" and not reasons:
        reasons = [target_gpu().kind]
    return Served(name, served.name, tuple(reasons))
