"""Low-rank updates of the attention projections (LoRA, Hu et al., arXiv 2106.09685).

    y = x W + (alpha / r) (x A) B        A [in, r] is random and B [r, out] zero at the start

Queries, keys, values and the output projection have one pair of factors each. A transformer keeps
factors beside its weights (`add_factors`); they can be merged into the weights (`merge`) or removed
(`drop_factors`). All three return a new transformer, which shares unchanged arrays with the
argument.

    layers.attention.qkv_proj.q.lora_a  [L, E, r]      .lora_b  [L, r, K, G, D]
    layers.attention.qkv_proj.k.lora_a  [L, E, r]      .lora_b  [L, r, K, 1, D]     (v alike)
    layers.attention.o_proj.o.lora_a    [L, H, D, r]   .lora_b  [L, r, E]
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dms_jax.checks import Count, Options, Positive
from dms_jax.config import ModelConfig
from dms_jax.model.layers import Linear, Stack
from dms_jax.model.parameters import Path, arrays_of, parameters_of, with_arrays
from dms_jax.model.transformer import Transformer
from dms_jax.policies.values import AdapterShape

_MARKS = ("lora_a", "lora_b")


@dataclasses.dataclass(frozen=True)
class LowRank(Options):
    """The size of low-rank updates.

    Attributes:
      rank: r, columns of A and rows of B.
      alpha: the update is multiplied by alpha / r.
    """

    rank: Count = 16
    alpha: Positive = 32.0

    @property
    def scale(self) -> float:
        """The factor of the product of A and B."""
        return float(self.alpha) / self.rank


class Factors(nnx.Module):
    """The factors A and B of one projection, and the product with both."""

    def __init__(
        self, inputs: dict[str, int], outputs: dict[str, int], rank: int, stack: Stack, dtype: Any
    ):
        layers = ("layers",) * len(stack)
        self.num_inputs = len(inputs)
        self.lora_a = nnx.Param(
            jnp.zeros((*stack, *inputs.values(), rank), dtype), axes=(*layers, *inputs, "rank")
        )
        self.lora_b = nnx.Param(
            jnp.zeros((*stack, rank, *outputs.values()), dtype), axes=(*layers, "rank", *outputs)
        )

    def __call__(
        self, x: Float[Array, "..."], scales: Float[Array, "B T R"] | None = None
    ) -> Float[Array, "..."]:
        narrow = jnp.tensordot(x, self.lora_a[...].astype(x.dtype), axes=self.num_inputs)
        if scales is not None:  # other adapters' numbers may be infinite
            narrow = jnp.where(scales > 0, narrow * scales.astype(x.dtype), 0)
        return jnp.tensordot(narrow, self.lora_b[...].astype(x.dtype), axes=1)

    def product(self) -> Float[Array, "L ..."]:
        """Returns A B of every layer, in at least float32."""
        a, b = self.lora_a[...], self.lora_b[...]
        wide = jnp.promote_types(a.dtype, jnp.float32)
        layers, *inputs, rank = a.shape
        matrices = jnp.einsum(
            "Lir,Lro->Lio",
            a.reshape(layers, -1, rank).astype(wide),
            b.reshape(layers, rank, -1).astype(wide),
            precision=jax.lax.Precision.HIGHEST,
        )
        return matrices.reshape(layers, *inputs, *b.shape[2:])


class LowRankLinear(Linear):
    """A linear map whose output is joined from parts, each with factors.

    Args:
      inputs: names and sizes of the input's axes.
      parts: those of each part's output, by its name: q, k and v, or o.
      outputs: those of the whole output.
      low_rank: the size of the updates.
      bias, stack, dtype: see `Linear`.
    """

    def __init__(
        self,
        inputs: dict[str, int],
        parts: dict[str, dict[str, int]],
        outputs: dict[str, int],
        low_rank: LowRank,
        *,
        bias: bool,
        stack: Stack,
        dtype: Any,
    ):
        super().__init__(inputs, outputs, stack=stack, bias=bias, dtype=dtype, rngs=nnx.Rngs(0))
        self.low_rank, self.parts = low_rank, tuple(parts)
        for name, own in parts.items():
            setattr(self, name, Factors(inputs, own, low_rank.rank, stack, dtype))

    def __call__(
        self, x: Float[Array, "..."], scales: Float[Array, "B T R"] | None = None
    ) -> Float[Array, "..."]:
        return super().__call__(x) + self._joined(lambda part: part(x, scales))

    def product(self) -> Float[Array, "L ..."]:
        """Returns the update of the matrix, in at least float32."""
        return self._joined(Factors.product)

    @property
    def matrix(self) -> Float[Array, "..."]:
        """See `Linear.matrix`; includes the update."""
        kernel = self.kernel[...]

        def update(part: Factors) -> jax.Array:
            a, b = (x.astype(kernel.dtype) for x in (part.lora_a[...], part.lora_b[...]))
            return jnp.tensordot(a, b, axes=1)

        return kernel + self._joined(update)

    def _joined(self, of: Callable[[Factors], jax.Array]) -> jax.Array:
        """Returns the scaled update, joined from those of the parts."""
        update = [of(getattr(self, name)) for name in self.parts]
        return self.low_rank.scale * jnp.concatenate(update, axis=-2)


def low_rank_of(transformer: Transformer) -> LowRank | None:
    """Returns the size of a transformer's low-rank updates; None if it has none."""
    projection = transformer.layers.attention.qkv_proj
    return projection.low_rank if isinstance(projection, LowRankLinear) else None


def skeleton(
    config: ModelConfig,
    *,
    adapter: AdapterShape | None,
    low_rank: LowRank | None,
    dtype: Any = jnp.float32,
) -> Transformer:
    """Returns an abstract transformer with such updates."""

    def make() -> Transformer:
        made = Transformer(config, adapter=adapter, dtype=dtype, rngs=nnx.Rngs(0))
        if low_rank is not None:
            attention = made.layers.attention
            stack, embed = (config.num_layers,), {"embed": config.hidden_size}
            queries = {"heads": config.num_heads, "head_dim": config.head_dim}
            q, k, v, joined = (
                {"kv_heads": config.num_kv_heads, "group": size, "head_dim": config.head_dim}
                for size in (config.group_size, 1, 1, config.group_size + 2)
            )
            parts, options = {"q": q, "k": k, "v": v}, dict(stack=stack, dtype=dtype)
            attention.qkv_proj = LowRankLinear(
                embed, parts, joined, low_rank, bias=config.qkv_bias, **options
            )
            attention.o_proj = LowRankLinear(
                queries, {"o": embed}, embed, low_rank, bias=config.output_bias, **options
            )
        return made

    return nnx.eval_shape(make)


def is_factor(path: Path) -> bool:
    """Whether the parameter at this path is a factor of a low-rank update."""
    return path[-1] in _MARKS


def factor_parameters(transformer: Transformer, low_rank: LowRank) -> dict[Path, nnx.Param]:
    """Returns the factors of such updates as abstract parameters, with shapes and axes."""
    wide = jnp.promote_types(transformer.embedding[...].dtype, jnp.float32)
    abstract = skeleton(
        transformer.config, adapter=transformer.adapter_shape, low_rank=low_rank, dtype=wide
    )
    return {path: param for path, param in parameters_of(abstract).items() if is_factor(path)}


def initial_factors(
    transformer: Transformer, low_rank: LowRank, key: jax.Array
) -> dict[Path, jax.Array]:
    """Returns factors in at least float32: A uniform in +-1 / sqrt(in) as in PEFT, B zero."""
    drawn = {}
    for place, (path, param) in enumerate(factor_parameters(transformer, low_rank).items()):
        shape, dtype = param.get_value().shape, param.get_value().dtype
        if path[-1] == "lora_b":
            drawn[path] = jnp.zeros(shape, dtype)
        else:
            limit = 1 / math.sqrt(math.prod(shape[1:-1]))
            own = jax.random.fold_in(key, place)
            drawn[path] = jax.random.uniform(own, shape, dtype, -limit, limit)
    return drawn


def add_factors(
    transformer: Transformer, low_rank: LowRank, factors: Mapping[Path, jax.Array]
) -> Transformer:
    """Returns the transformer with these factors, replacing existing ones."""
    return _filled(transformer, low_rank, arrays_of(transformer) | dict(factors))


def drop_factors(transformer: Transformer) -> Transformer:
    """Returns the transformer without low-rank updates."""
    if low_rank_of(transformer) is None:
        return transformer
    return _filled(transformer, None, arrays_of(transformer))


def merge(transformer: Transformer) -> Transformer:
    """Returns the transformer with its low-rank updates added to the weights.

    The sums are rounded to the dtype of the weights.
    """
    if low_rank_of(transformer) is None:
        return transformer
    arrays = arrays_of(transformer)
    attention = transformer.layers.attention
    for name, projection in (("qkv_proj", attention.qkv_proj), ("o_proj", attention.o_proj)):
        assert isinstance(projection, LowRankLinear)
        path = ("layers", "attention", name, "kernel")
        arrays[path] = _add(arrays[path], projection.product())
    return _filled(transformer, None, arrays)


def _add(kernel: jax.Array, update: jax.Array) -> jax.Array:
    merged = (kernel.astype(jnp.promote_types(kernel.dtype, update.dtype)) + update).astype(
        kernel.dtype
    )
    return jax.device_put(merged, kernel.sharding)


def _filled(
    transformer: Transformer, low_rank: LowRank | None, arrays: Mapping[Path, jax.Array]
) -> Transformer:
    """Returns a transformer of the same shape with such updates and these arrays."""
    abstract = skeleton(transformer.config, adapter=transformer.adapter_shape, low_rank=low_rank)
    return with_arrays(abstract, arrays)
