"""TriAttention (Mao et al., arXiv 2604.04921): predicts attention of future queries by position.

Unrotated queries of a head lie around a centre. With q_f and k_f the f-th complex plane of a query
and of an unrotated key (dims f and f + D/2), omega_f its frequency, s the factor of the rotation,
E the mean over queries of some text, t the position of the next token and j that of the key,

    score_j = mean over d in 1, 2, 4, ... 65536 of
              sum_f s^2 |E q_f| |k_f| cos((t - j + d) omega_f + arg(E q_f conj(k_f)))
            + sum_f s^2 (E |q_f| - |E q_f|) |k_f|

which is the product of the rotated key with the centre turned by the mean rotation of all t + d
(arXiv 2607.13051), so key positions are not needed. A KV head takes the largest score of its query
heads. No attention weights are used.

Tokens of prompts are always kept. When the number of tokens is a multiple of `interval` and the
rows hold `budget` tokens in addition to the prompt, they are cut to `budget` tokens including the
prompt, as in the authors' code (github.com/WeianMao/triattention,
`triattention/methods/triattention.py`, per layer and KV head). If the prompt alone fills the
budget, that code cuts the prompt; here such a sequence is not cut.

The centres come from `statistics`, a file of a few KB per head that
`dms_jax.training.calibrate_queries` makes from any text. Without a file, unlike in the publication,
they are those of the sequence's own queries so far; the state then holds 1.5 D numbers per query
head.
"""

import dataclasses
import functools
import pathlib
from typing import Annotated, Any, no_type_check

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jaxtyping import Array, Bool, Float
from safetensors.numpy import load_file

from dms_jax.checks import Range, Traced
from dms_jax.errors import ConfigError
from dms_jax.policies.future_rotation import last_rotation, mean_rotation, turn
from dms_jax.policies.periodic_eviction import AnswerEviction, holds
from dms_jax.policies.values import ROWS, CacheShape, Chunk

FURTHEST = 2**16  # positions; the largest distance of the schedule, as published


@no_type_check  # jax also builds it from shapes and from partitions
@struct.dataclass
class Centres:
    """Means over unrotated queries: of the queries, and of the norms of their planes."""

    mean: Float[Array, "B K G D"] = struct.field(metadata=ROWS)
    norm: Float[Array, "B K G half"] = struct.field(metadata=ROWS)


@no_type_check
@struct.dataclass
class Statistics:
    """The centres of a file, as an argument of programs."""

    mean: Float[Array, "L H D"]
    norm: Float[Array, "L H half"]
    path: str = struct.field(pytree_node=False, default="")

    @classmethod
    def of(cls, path: str) -> "Statistics":
        """Reads a file.

        Raises:
          ConfigError: there is no such file, or it holds something else.
        """
        arrays: Any = _read(path, _changed(path))
        return cls(**arrays, path=path)

    @staticmethod
    def file(value: Any) -> Any:
        """Returns the path of a read file, and other values unchanged."""
        read = isinstance(value, Statistics) and isinstance(value.mean, np.ndarray)
        return value.path if read else value


@dataclasses.dataclass(frozen=True)
class TriAttention(AnswerEviction):
    """Keeps the keys that the centres of queries will attend to, in long answers.

    Attributes:
      budget, compression_ratio, interval: see `AnswerEviction`.
      statistics: file of the centres; None for those of the sequence's own queries.
      counts_prompt: whether the prompt counts towards the `budget` tokens at which rows are cut.
      furthest: upper bound on the distances d, which are powers of two.
    """

    statistics: Annotated[str | None, Traced(Statistics.of, Statistics.file)] = None
    counts_prompt: bool = False
    furthest: Annotated[int, Range(1, FURTHEST)] = FURTHEST

    def init_own(self, shape: CacheShape) -> Any:
        """Returns the centres of zero queries; nothing if they come from a file."""
        if self.statistics is not None:
            return ()
        size = (*shape.rows, shape.group)
        return Centres(
            mean=jnp.zeros((*size, shape.head_dim), shape.wide),
            norm=jnp.zeros((*size, shape.head_dim // 2), shape.wide),
        )

    def observe_own(self, own: Any, chunk: Chunk, q: Float[Array, "B T H D"]) -> Any:
        """Adds the chunk's unrotated queries to the means."""
        if self.statistics is not None:
            return own
        wide = own.mean.dtype
        batch, num_kv_heads, group, head_dim = own.mean.shape
        queries = chunk.tokens.q.astype(wide).reshape(batch, -1, num_kv_heads, group, head_dim)
        used = chunk.valid[:, 0, :, None, None, None]
        queries = jnp.where(used, queries, 0)
        seen = chunk.first.astype(wide)[:, None, None, None]
        total = jnp.maximum(seen + chunk.count.astype(wide)[:, None, None, None], 1)

        def added(mean, values):
            return mean + (values.sum(1) - chunk.count[:, None, None, None] * mean) / total

        return Centres(
            mean=added(own.mean, queries), norm=added(own.norm, jnp.hypot(*_planes(queries)))
        )

    def due(self, state, lengths, chunk) -> Bool[Array, " B"]:
        """Returns whether the number of tokens is a multiple of the interval, and rows are full."""
        budget, prompt = self.layer_budget(chunk)[:, 0], state.rows.base[:, 0]
        full = holds(lengths, budget + (0 if self.counts_prompt else prompt), chunk)
        return full & (prompt < budget) & ((chunk.newest + 1) % self.interval == 0)

    def scores(self, state, chunk, rows) -> Float[Array, "B K S"]:
        """Returns the largest scores of a group, one query head at a time; +inf for the prompt."""
        wide = jnp.promote_types(rows.k.dtype, jnp.float32)
        keys = rows.k.astype(wide)
        lengths = jnp.hypot(*_planes(keys))  # [B, K, S, half], with the factor s
        centres = self._centres(state.rows.own, chunk, keys.shape[1], wide)
        distances = 2 ** np.arange(self.furthest.bit_length())
        cos, sin = mean_rotation(chunk, 1 + distances, wide)
        factor = jnp.hypot(*last_rotation(chunk, wide))
        may_go = rows.live & (jnp.arange(keys.shape[2]) >= state.rows.base[..., None])

        def of_head(centre: Centres) -> Float[Array, "B K S"]:
            spread = factor * (centre.norm - jnp.hypot(*_planes(centre.mean)))
            score = jnp.einsum("BKD,BKSD->BKS", turn(centre.mean, cos, sin), keys)
            return score + jnp.einsum("BKF,BKSF->BKS", spread, lengths)

        by_head = jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), centres)
        scores = jax.lax.map(of_head, by_head)
        return jnp.where(may_go, scores.max(0), jnp.inf)

    def _centres(self, own: Any, chunk: Chunk, num_kv_heads: int, dtype: Any) -> Centres:
        """Returns the centres of the layer's query heads; from a file without a sequence axis."""
        found: Any = self.statistics
        if found is None:
            return jax.tree.map(lambda x: x.astype(dtype), own)
        if isinstance(found, str):  # outside programs
            found = Statistics.of(found)
        layers, heads, head_dim = found.mean.shape
        axis = chunk.static.head_axis
        shards = 1 if axis is None else jax.lax.axis_size(axis)
        group = heads // (num_kv_heads * shards)
        model = chunk.static.num_layers, 2 * len(chunk.static.frequencies)
        if (layers, head_dim) != model or heads % (num_kv_heads * shards):
            raise ConfigError(
                f"TriAttention: {found.path} has centres of {layers} layers with {heads} heads of "
                f"{head_dim}, and the model has {model[0]} with {num_kv_heads * shards} KV heads "
                f"of {model[1]}. Calibrate this model."
            )
        first = 0 if axis is None else jax.lax.axis_index(axis) * num_kv_heads

        def of_layer(values: Array | np.ndarray) -> Array:
            values = jnp.asarray(values, dtype)[chunk.tokens.layer]
            values = values.reshape(num_kv_heads * shards, group, -1)
            return jax.lax.dynamic_slice_in_dim(values, first, num_kv_heads)[None]

        return Centres(mean=of_layer(found.mean), norm=of_layer(found.norm))


def _planes(x: Float[Array, "... D"]) -> tuple[Array, Array]:
    """Returns the two coordinates of each plane."""
    low, high = jnp.split(x, 2, axis=-1)
    return low, high


def _changed(path: str) -> tuple[int, int] | None:
    file = pathlib.Path(path)
    return (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else None


@functools.lru_cache(maxsize=8)
def _read(path: str, changed: tuple[int, int] | None) -> dict[str, np.ndarray]:
    """Reads a file of centres: `mean` [L, H, D] and `norm` [L, H, D/2].

    Raises:
      ConfigError: there is no such file, or it holds something else.
    """
    if changed is None:
        raise ConfigError(
            f"TriAttention: there is no file {path!r}. Make one of some text with "
            "dms_jax.training.calibrate_queries(model, tokens, path), or leave statistics out."
        )
    try:
        found = load_file(path)
    except Exception as error:  # safetensors raises many different classes
        raise ConfigError(f"TriAttention: {path} is not a safetensors file: {error}") from error
    shapes = {name: array.shape for name, array in found.items()}
    mean = shapes.get("mean", ())
    if len(mean) != 3 or shapes != {"mean": mean, "norm": (*mean[:2], mean[2] // 2)}:
        raise ConfigError(
            f"TriAttention: {path} holds {shapes}, not mean [L, H, D] and norm [L, H, D/2] of "
            "queries. Make it with dms_jax.training.calibrate_queries."
        )
    return found
