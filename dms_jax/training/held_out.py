"""The losses of a model on held-out batches: language modelling, and distance from a teacher."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from dms_jax.data.batches import check_batch, check_batch_list
from dms_jax.devices import fits_device
from dms_jax.errors import DataError
from dms_jax.model.language_model import LanguageModel, use_mesh
from dms_jax.model.transformer import Transformer
from dms_jax.policies import Policy, Vanilla
from dms_jax.training import losses
from dms_jax.training.parameters import cast, parameters, rebuilder
from dms_jax.training.step import Passes


def held_out_loss(
    model: LanguageModel,
    batches: Mapping[str, Any],
    *,
    teacher: LanguageModel | None = None,
    policy: Policy | str | None = None,
    compute_dtype: str | None = "bfloat16",
) -> dict[str, float]:
    """Returns the mean loss of each part of the data, in nats per token.

    The loss is the negative log-likelihood of the next token or, with a teacher, the divergence
    KL(model || teacher) at the same positions.

    Args:
      model: the model to measure.
      batches: name of each part -> a list of its batches, as for `train`; batches of one shape
        share one compiled program. Iterators are rejected, because training iterators are endless.
      teacher: the model that `model` was distilled from, with the vanilla cache; None for the
        likelihood.
      policy: the policy whose hard decisions apply; None for the model's own.
      compute_dtype: dtype of the forward pass; None for that of the parameters.

    Raises:
      ConfigError: the model cannot run the policy, or a part is not a list of batches.
      DataError: the loss mask of a part leaves no token, or a batch is malformed.
      OutOfMemoryError: a device has too little memory for a batch.
    """
    policy = model.resolve_policy(policy)
    for name, part in batches.items():
        check_batch_list(f"Part {name!r} of the held-out data", part)
    original = None if teacher is None else teacher.transformer
    result = {}
    room = fits_device(
        "The device ran out of memory while measuring held-out batches. Give them fewer or shorter "
        "sequences each."
    )
    with use_mesh(model.mesh), room:
        for name, part in batches.items():
            sums = []
            for batch in part:
                given = check_batch(batch, vocab_size=model.config.vocab_size)
                passes = Passes(**{key: jnp.asarray(array) for key, array in given.items()})
                sums.append(_sums(model.transformer, original, passes, policy, compute_dtype))
            total, count = np.sum(jax.device_get(sums), axis=0) if sums else (0.0, 0.0)
            if count == 0:
                raise DataError(
                    f"Part {name!r} of the held-out data has no token that counts in the loss."
                )
            result[name] = float(total / count)
    return result


@functools.partial(jax.jit, static_argnames="compute_dtype")
def _sums(
    transformer: Transformer,
    teacher: Transformer | None,
    passes: Passes,
    policy: Policy,
    compute_dtype: str | None,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the sum of the losses of a batch, and the number of tokens that it counts."""

    def run(transformer: Transformer, policy: Policy) -> Any:
        narrow: Any = rebuilder(transformer)(cast(parameters(transformer), compute_dtype))
        hidden = narrow(passes.tokens, policy, segment_ids=passes.segment_ids).hidden
        return losses.Head(hidden, narrow.output_matrix)

    sums = losses.token_losses(
        run(transformer, policy),
        None if teacher is None else run(teacher, Vanilla()),
        targets=jnp.roll(passes.tokens, -1, axis=-1),
        mask=passes.target_mask,
        target_mask=passes.target_mask,
    )
    total = sums.language_modeling if teacher is None else sums.distillation
    return total, passes.target_mask.sum().astype(total.dtype)
