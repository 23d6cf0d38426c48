"""Several adapters on one base model; each sequence chooses one.

An adapter is a decision head (`layers.Adapter`), low-rank updates (`low_rank`), or both. The
adapters of a model are stacked, and every token carries the number of its adapter (its slot):

    decision heads      layers.adapter.each.*                  [L, slots, ...]
    low-rank updates    layers.attention.qkv_proj.q.lora_a     [L, E, R]        R = all ranks
                        layers.attention.qkv_proj.q.lora_b     [L, R, K, G, D]  (k, v, o alike)

    y = x W + (s * x A) B        s [R] is a token's own: alpha / r in the columns of its adapter,
                                 and 0 in those of the others

So updates of any ranks act as one update whose rank is their sum: nothing is gathered by token, and
a step reads the weights once for all lanes. The time of these products grows with the number of
adapters; rank 16 at width 2,048 costs 1% of a projection. All decision heads are computed, and each
token selects its logits.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from dms_jax import processes
from dms_jax.cache.pool import LaneAdapters
from dms_jax.config import ModelConfig
from dms_jax.errors import ConfigError
from dms_jax.model import low_rank
from dms_jax.model.language_model import LanguageModel
from dms_jax.model.layers import Adapter, Linear, Stack, rms_norm
from dms_jax.model.low_rank import LowRank
from dms_jax.model.parameters import Path, arrays_of, parameters_of, place_of, with_arrays
from dms_jax.model.transformer import Transformer
from dms_jax.policies.base import Policy
from dms_jax.policies.dms import DMS
from dms_jax.policies.values import AdapterShape

_HEAD = ("layers", "adapter")


@dataclasses.dataclass(frozen=True)
class AdapterWeights:
    """An adapter without its model.

    Attributes:
      policy: the policy that it was trained for.
      shape: the shape of its decision head; None if it has none.
      low_rank: the size of its low-rank updates; None if it has none.
      arrays: its parameters, by path in a transformer with only this adapter.
    """

    policy: Policy
    shape: AdapterShape | None
    low_rank: LowRank | None
    arrays: Mapping[Path, Any]

    @classmethod
    def of(cls, model: LanguageModel) -> "AdapterWeights":
        """Returns the adapter of a model from `load(..., adapter=...)` or `retrofit`."""
        arrays = arrays_of(model.transformer)
        return cls(
            model.policy,
            model.transformer.adapter_shape,
            low_rank.low_rank_of(model.transformer),
            {path: array for path, array in arrays.items() if is_of_adapter(path)},
        )

    def without_head(self) -> "AdapterWeights":
        """Returns only its low-rank updates, for a policy that reads no head."""
        left = {path: array for path, array in self.arrays.items() if path[:2] != _HEAD}
        return dataclasses.replace(self, shape=None, arrays=left)

    @property
    def rank(self) -> int:
        """Columns of its low-rank updates; 0 if it has none."""
        return 0 if self.low_rank is None else self.low_rank.rank

    @property
    def is_empty(self) -> bool:
        """Whether there is neither a head nor an update."""
        return self.shape is None and self.low_rank is None


def is_of_adapter(path: Path) -> bool:
    """Whether the parameter at this path belongs to a decision head or a low-rank update."""
    return path[:2] == _HEAD or low_rank.is_factor(path)


def zeros_keep_all(policy: Policy) -> bool:
    """Whether a decision head of zeros evicts nothing, so that a model can run without one."""
    return isinstance(policy, DMS) and policy.decisions == "threshold" and policy.alpha_offset >= 0


def check_policy(model: LanguageModel, adapter: AdapterWeights, policy: Policy) -> None:
    """Raises ConfigError if a model with an adapter cannot run a policy: see `resolve_policy`."""
    transformer = low_rank.skeleton(model.config, adapter=adapter.shape, low_rank=adapter.low_rank)
    own = dataclasses.replace(model, transformer=transformer, policy=adapter.policy)
    own.resolve_policy(policy)


@dataclasses.dataclass(frozen=True)
class Slots:
    """The adapters of a model, by slot.

    Attributes:
      names: their names; None for the plain model.
      adapters: the adapter of each slot; an empty one is the plain model.
      ranks: columns of each slot, at least the rank of its adapter.
    """

    names: tuple[str | None, ...]
    adapters: tuple[AdapterWeights, ...]
    ranks: tuple[int, ...]

    @classmethod
    def of(cls, adapters: Mapping[str | None, AdapterWeights]) -> "Slots":
        """Returns slots of the sizes of their adapters."""
        each = tuple(adapters.values())
        return cls(tuple(adapters), each, tuple(one.rank for one in each))

    def replaced(self, name: str | None, adapter: AdapterWeights) -> "Slots":
        """Returns the slots with one adapter replaced.

        Raises:
          ConfigError: the adapter does not fit, as it would need new programs.
        """
        slot = self.names.index(name)
        if adapter.rank > self.ranks[slot]:
            raise ConfigError(
                f"Adapter {name!r} has low-rank updates of rank {adapter.rank}, and the engine was "
                f"made for rank {self.ranks[slot]} in its place. Make an engine, or start the "
                "server, with this one."
            )
        adapters = (*self.adapters[:slot], adapter, *self.adapters[slot + 1 :])
        return dataclasses.replace(self, adapters=adapters)

    def lanes(self, names: Sequence[str | None]) -> LaneAdapters:
        """Converts adapters of lanes, given by name, to an argument of programs."""
        slots = np.array([self.names.index(name) for name in names], np.int32)
        ends = np.cumsum([0, *self.ranks])
        scales = np.zeros((len(self.ranks), ends[-1]), jax.dtypes.canonicalize_dtype(float))
        for row, start, each in zip(scales, ends, self.adapters, strict=False):
            if each.low_rank is not None:
                row[start : start + each.rank] = each.low_rank.scale
        lanes: Any = slots, scales[slots] if ends[-1] else None
        return LaneAdapters(*lanes)

    def join(self, model: LanguageModel) -> Transformer:
        """Returns the transformer of a model with these adapters stacked into it."""
        arrays = {
            path: array
            for path, array in arrays_of(model.transformer).items()
            if not is_of_adapter(path)
        }
        config, rank = model.config, sum(self.ranks)
        shape = next((each.shape for each in self.adapters if each.shape is not None), None)
        of_all = LowRank(rank, alpha=float(rank)) if rank else None  # lanes have the scales
        abstract = low_rank.skeleton(config, adapter=shape, low_rank=of_all)
        if shape is not None:
            options = dict(stack=(config.num_layers,), dtype=jnp.float32)
            count = len(self.adapters)
            layers: Any = abstract.layers
            layers.adapter = nnx.eval_shape(
                lambda: Heads(config, shape, count, **options, rngs=nnx.Rngs(0))
            )
        for path, param in parameters_of(abstract).items():
            if path not in arrays:
                value = self._stacked(path, param.get_value().shape)
                arrays[path] = processes.put(value, place_of(param, model.mesh))
        return with_arrays(abstract, arrays)

    def _stacked(self, path: Path, shape: tuple[int, ...]) -> np.ndarray:
        """Returns a parameter of all slots, on the host; zeros where an adapter has none."""
        is_head = path[:2] == _HEAD
        path = (*_HEAD, *path[3:]) if is_head else path
        found = [each.arrays.get(path) for each in self.adapters]
        dtype = jnp.result_type(*(own.dtype for own in found if own is not None))
        if is_head:
            fresh = np.ones if path[-1] == "scale" else np.zeros  # "scale" belongs to a norm
            none = fresh((shape[0], *shape[2:]), dtype)
            parts = [none if own is None else np.asarray(own, dtype) for own in found]
            return np.stack(parts, axis=1)
        axis, parts = len(shape) - 1 if path[-1] == "lora_a" else 1, []
        for own, rank in zip(found, self.ranks, strict=True):
            parts.append(np.zeros((*shape[:axis], rank, *shape[axis + 1 :]), dtype))
            if own is not None:
                parts[-1][(slice(None),) * axis + (slice(own.shape[axis]),)] = np.asarray(own)
        return np.concatenate(parts, axis=axis)


class Heads(nnx.Module):
    """The decision heads of several adapters; see `layers.Adapter`."""

    def __init__(
        self,
        config: ModelConfig,
        shape: AdapterShape,
        count: int,
        *,
        stack: Stack,
        dtype: Any,
        rngs: nnx.Rngs,
    ):
        self.shape = shape
        self.each = Adapter(config, shape, stack=(*stack, count), dtype=dtype, rngs=rngs)

    def __call__(
        self, residual: Float[Array, "B T E"], slots: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B K T"], Float[Array, "B K T"] | None]:
        """Returns the logits of each token's head, and the late logits if there are any."""
        each, x = self.each, residual.astype(jnp.promote_types(residual.dtype, jnp.float32))
        x = rms_norm(x, each.norm.scale[...][slots], each.norm.epsilon)
        if each.hidden is not None:
            x = jax.nn.gelu(_multiply(each.hidden, x, slots))
        late = None if each.late is None else jnp.swapaxes(_multiply(each.late, x, slots), 1, 2)
        return jnp.swapaxes(_multiply(each.proj, x, slots), 1, 2), late


def _multiply(
    linear: Linear, x: Float[Array, "B T n"], slots: Int[Array, "B T"]
) -> Float[Array, "B T m"]:
    """Returns each token's product with its slot's matrix of [slots, n, m]."""
    kernel = linear.kernel[...].astype(x.dtype)
    if x.shape[1] > 1:
        y = jnp.einsum("BTn,snm->BTsm", x, kernel)
    else:  # a sum, faster than a library's product here; see `layers.Adapter`
        y = (x[..., None, None, :] * jnp.swapaxes(kernel, 1, 2)).sum(-1)
    if linear.bias is not None:
        y += linear.bias[...].astype(x.dtype)
    return jnp.take_along_axis(y, slots[..., None, None], axis=2)[:, :, 0]
