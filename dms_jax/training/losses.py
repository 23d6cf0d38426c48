"""The main loss of training: logit distillation, or language modelling.

    reverse   L_D = mean over tokens of KL(student || teacher) = sum_v p_S (log p_S - log p_T)
    forward   L_D = mean over tokens of KL(teacher || student) = sum_v p_T (log p_T - log p_S)

NVIDIA's code computes the reverse direction.

Logits are computed for a few positions at a time, in at least float32, and recomputed in the
backward pass: the [B, T, V] log-probabilities of teacher and student never exist as a whole.
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

Direction = Literal["reverse", "forward"]
Unembed = Callable[[Float[Array, "*rows E"]], Float[Array, "*rows V"]]

# Logits of the teacher, and of the student, that may exist at a time, in elements.
CHUNK_ELEMENTS = 2**26


@struct.dataclass
class TokenLosses:
    """Sums over the positions that count in the loss.

    Attributes:
      distillation: sum of the divergence from the teacher; zero without a teacher.
      language_modeling: sum of the negative log-likelihood of the next token.
    """

    distillation: Float[Array, ""]
    language_modeling: Float[Array, ""]


def divergence(
    student: Float[Array, "*rows V"], teacher: Float[Array, "*rows V"], direction: Direction
) -> Float[Array, "*rows"]:
    """Returns the KL divergence of log-probabilities, in nats; see the module docstring."""
    if direction == "reverse":
        return jnp.sum(jnp.exp(student) * (student - teacher), axis=-1)
    return jnp.sum(jnp.exp(teacher) * (teacher - student), axis=-1)


def token_losses(
    student: tuple[Float[Array, "B T E"], Unembed],
    teacher: tuple[Float[Array, "B T E"], Unembed] | None,
    *,
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    target_mask: Bool[Array, "B T"],
    direction: Direction,
    chunk: int | None = None,
) -> TokenLosses:
    """Returns the sums of the losses over the positions of a batch.

    Args:
      student: hidden states after the final norm, and the function that turns them into logits.
      teacher: the same for the teacher; None for language modelling alone.
      targets: the token after each position.
      mask: positions where the distillation loss compares student and teacher.
      target_mask: positions whose next token counts in the language modelling loss.
      direction: direction of the divergence.
      chunk: positions of a sequence that are unembedded at a time; None for a choice by size.
    """
    hidden, unembed = student
    batch, length, _ = hidden.shape
    if chunk is None:
        vocab_size = jax.eval_shape(unembed, hidden).shape[-1]
        chunk = max(1, CHUNK_ELEMENTS // (batch * vocab_size))

    def sums(hidden, teacher_hidden, targets, mask, target_mask) -> TokenLosses:
        logits = jax.nn.log_softmax(unembed(hidden))
        likelihood = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        distillation = jnp.zeros((), logits.dtype)
        if teacher is not None:
            wanted = jax.lax.stop_gradient(jax.nn.log_softmax(teacher[1](teacher_hidden)))
            distances = divergence(logits, wanted, direction)
            distillation = jnp.sum(jnp.where(mask, distances, 0))
        return TokenLosses(
            distillation=distillation,
            language_modeling=-jnp.sum(jnp.where(target_mask, likelihood, 0)),
        )

    arrays = (hidden, hidden if teacher is None else teacher[0], targets, mask, target_mask)
    if chunk >= length:
        return sums(*arrays)
    count = math.ceil(length / chunk)

    def chunks(x: Array) -> Array:
        """[B, T, ...] to [chunks, B, chunk, ...], with padding that the masks leave out."""
        pad = ((0, 0), (0, count * chunk - length), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, pad).reshape(batch, count, chunk, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def add(total: TokenLosses, xs: tuple[Array, ...]) -> tuple[TokenLosses, None]:
        return jax.tree.map(jnp.add, total, jax.checkpoint(sums)(*xs)), None

    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    zero = TokenLosses(distillation=jnp.zeros((), wide), language_modeling=jnp.zeros((), wide))
    total, _ = jax.lax.scan(add, zero, tuple(chunks(x) for x in arrays))
    return total
