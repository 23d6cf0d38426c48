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
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from dms_jax.checks import Count, Options, Positive
from dms_jax.config import ModelConfig
from dms_jax.model.layers import Linear, Stack
from dms_jax.model.transformer import Transformer
from dms_jax.policies.values import AdapterShape

Path = tuple[Any, ...]

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


class LowRankQKV(Linear):
    """The fused projection of queries, keys and values, each with factors."""

    def __init__(self, config: ModelConfig, low_rank: LowRank, *, stack: Stack, dtype: Any):
        embed, heads = {"embed": config.hidden_size}, {"kv_heads": config.num_kv_heads}
        sizes = {"q": config.group_size, "k": 1, "v": 1}
        shapes = {
            name: heads | {"group": size, "head_dim": config.head_dim}
            for name, size in (sizes | {"all": config.group_size + 2}).items()
        }
        rngs = nnx.Rngs(0)
        super().__init__(
            embed, shapes["all"], stack=stack, bias=config.qkv_bias, dtype=dtype, rngs=rngs
        )
        self.low_rank = low_rank
        self.q, self.k, self.v = (
            Factors(embed, shapes[name], low_rank.rank, stack, dtype) for name in sizes
        )

    def __call__(
        self, x: Float[Array, "B T E"], scales: Float[Array, "B T R"] | None = None
    ) -> Float[Array, "B T K parts D"]:
        parts = [part(x, scales) for part in (self.q, self.k, self.v)]
        update = jnp.concatenate(parts, axis=-2)
        return super().__call__(x) + self.low_rank.scale * update

    def product(self) -> Float[Array, "L E K parts D"]:
        """Returns the update of the fused matrix."""
        parts = [part.product() for part in (self.q, self.k, self.v)]
        return self.low_rank.scale * jnp.concatenate(parts, axis=-2)


class LowRankOutput(Linear):
    """The output projection, with factors."""

    def __init__(self, config: ModelConfig, low_rank: LowRank, *, stack: Stack, dtype: Any):
        queries = {"heads": config.num_heads, "head_dim": config.head_dim}
        embed = {"embed": config.hidden_size}
        rngs = nnx.Rngs(0)
        super().__init__(
            queries, embed, stack=stack, bias=config.output_bias, dtype=dtype, rngs=rngs
        )
        self.low_rank = low_rank
        self.o = Factors(queries, embed, low_rank.rank, stack, dtype)

    def __call__(
        self, x: Float[Array, "B T H D"], scales: Float[Array, "B T R"] | None = None
    ) -> Float[Array, "B T E"]:
        return super().__call__(x) + self.low_rank.scale * self.o(x, scales)

    @property
    def matrix(self) -> Float[Array, "H D E"]:
        """See `Linear.matrix`; includes the update."""
        a, b = (x.astype(self.kernel[...].dtype) for x in (self.o.lora_a[...], self.o.lora_b[...]))
        return self.kernel[...] + self.low_rank.scale * jnp.tensordot(a, b, axes=1)

    def product(self) -> Float[Array, "L H D E"]:
        """Returns the update of the matrix."""
        return self.low_rank.scale * self.o.product()


def low_rank_of(transformer: Transformer) -> LowRank | None:
    """Returns the size of a transformer's low-rank updates; None if it has none."""
    projection = transformer.layers.attention.qkv_proj
    return projection.low_rank if isinstance(projection, LowRankQKV) else None


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
            options: dict[str, Any] = dict(stack=(config.num_layers,), dtype=dtype)
            made.layers.attention.qkv_proj = LowRankQKV(config, low_rank, **options)
            made.layers.attention.o_proj = LowRankOutput(config, low_rank, **options)
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
    return {path: param for path, param in _flat(abstract).items() if is_factor(path)}


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
        assert isinstance(projection, LowRankQKV | LowRankOutput)
        path = ("layers", "attention", name, "kernel")
        arrays[path] = _add(arrays[path], projection.product())
    return _filled(transformer, None, arrays)


def _add(kernel: jax.Array, update: jax.Array) -> jax.Array:
    merged = (kernel.astype(jnp.promote_types(kernel.dtype, update.dtype)) + update).astype(
        kernel.dtype
    )
    return jax.device_put(merged, kernel.sharding)


def _flat(transformer: Transformer) -> dict[Path, Any]:
    return dict(nnx.to_flat_state(nnx.state(transformer, nnx.Param)))


def arrays_of(transformer: Transformer) -> dict[Path, jax.Array]:
    """Returns the parameters by path."""
    return {path: param.get_value() for path, param in _flat(transformer).items()}


def _filled(
    transformer: Transformer, low_rank: LowRank | None, arrays: Mapping[Path, jax.Array]
) -> Transformer:
    """Returns a transformer of the same shape with such updates and these arrays."""
    abstract = skeleton(transformer.config, adapter=transformer.adapter_shape, low_rank=low_rank)
    graph, state = nnx.split(abstract)
    filled = [(path, param.replace(arrays[path])) for path, param in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))
