"""The language modelling loss of a model on batches that it was not trained on."""

import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dms_jax.data.batches import Batch
from dms_jax.errors import DataError
from dms_jax.model.language_model import LanguageModel, use_mesh
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy
from dms_jax.training import losses
from dms_jax.training.parameters import cast, parameters, rebuilder
from dms_jax.training.step import Passes


def held_out_loss(
    model: LanguageModel,
    batches: Mapping[str, Iterable[Batch]],
    *,
    policy: Policy | None = None,
    compute_dtype: str | None = "bfloat16",
) -> dict[str, float]:
    """Mean negative log-likelihood of the tokens that count, of each part of the data.

    Args:
      model: to measure.
      batches: of each part by its name, as `train` takes them; of one shape, for one program.
      policy: whose hard decisions are in force; the model's own if None.
      compute_dtype: of the pass; None for that of the parameters.

    Returns:
      The loss of each part, in nats a token.

    Raises:
      ConfigError: the model cannot run the policy.
      DataError: a part has no token that counts.
    """
    policy = model.resolve_policy(policy)
    result = {}
    with use_mesh(model.mesh):
        for name, part in batches.items():
            sums = []
            for batch in part:
                tokens = jnp.asarray(batch["tokens"], jnp.int32)
                mask, segment_ids = batch.get("loss_mask"), batch.get("segment_ids")
                passes = Passes(
                    tokens=tokens,
                    loss_mask=jnp.ones(tokens.shape, bool) if mask is None else jnp.asarray(mask),
                    segment_ids=None if segment_ids is None else jnp.asarray(segment_ids),
                )
                sums.append(_sums(model.transformer, passes, policy, compute_dtype))
            total, count = np.sum(jax.device_get(sums), axis=0) if sums else (0.0, 0.0)
            if count == 0:
                raise DataError(f"part {name!r} of the held-out data has no token that counts")
            result[name] = float(total / count)
    return result


@functools.partial(jax.jit, static_argnames=("policy", "compute_dtype"))
def _sums(
    transformer: Transformer, passes: Passes, policy: Policy, compute_dtype: str | None
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sum of the losses of a batch, and how many tokens it is over."""
    narrow: Any = rebuilder(transformer)(cast(parameters(transformer), compute_dtype))
    hidden = narrow(passes.tokens, policy, segment_ids=passes.segment_ids).hidden
    sums = losses.token_losses(
        (hidden, narrow.unembed),
        None,
        targets=jnp.roll(passes.tokens, -1, axis=-1),
        mask=passes.loss_mask,
        target_mask=passes.target_mask,
        direction="reverse",
    )
    total = sums.language_modeling
    return total, passes.target_mask.sum().astype(total.dtype)
