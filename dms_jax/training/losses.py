"""The main loss of training: logit distillation, or language modelling.

    L_D = mean over tokens of KL(student || teacher) = sum_v p_S (log p_S - log p_T)

as in NVIDIA's code. At a temperature T both use softmax(logits / T), and the loss is T^2 L_D,
because gradients shrink by 1 / T^2 (Hinton et al., arXiv 1503.02531).

Logits are computed for a few positions at a time: the full [B, T, V] log-probabilities of teacher
and student never exist. Their gradients have a closed form, with z the logits of the student and KL
the divergence at the position,

    distillation         dz = T p_S (log p_S - log p_T - KL)
    language modelling   dz = p_S - 1[v = target]

so the forward pass already multiplies them with the hidden states and the output matrix, and the
backward pass only scales the results: no logit is computed twice. Products take operands of the
hidden states' type and are summed in at least float32, as is the gradient of the output matrix over
all chunks.

Inside `shard_map`, all arrays hold one shard's sequences or tokens.
"""

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Bool, Float, Int

from dms_jax import sharding
from dms_jax.checks import Number

# The most logits of the teacher, and of the student, on a device at a time.
CHUNK_ELEMENTS = 2**28
# The maximum of the first 1/16 of the logits is subtracted from all of them. Sums are computed
# again if another logit exceeds it by 40: exp(40) * 2^18 is still far from the float32 maximum.
_PART_OF_ORIGIN, _FAR = 16, 40.0


@struct.dataclass
class Head:
    """The hidden states and the output matrix, whose products are the logits.

    Attributes:
      hidden: hidden states after the final norm.
      matrix: the whole output matrix, in any type.
      parameter: receives the gradient of the matrix, in its own type: the matrix itself or its
        columns on this device; None for a frozen one.
    """

    hidden: Float[Array, "B T E"]
    matrix: Float[Array, "V E"]
    parameter: Float[Array, "V columns"] | None = None


@struct.dataclass
class TokenLosses:
    """Sums over the positions that count in the loss.

    Attributes:
      main: the sum that has gradients: `language_modeling` without a teacher, else `distillation`
        and, times `text_weight`, `language_modeling`.
      distillation: sum of the divergence from the teacher; zero without a teacher.
      language_modeling: sum of the negative log-likelihood of the next token.
    """

    main: Float[Array, ""]
    distillation: Float[Array, ""]
    language_modeling: Float[Array, ""]


class _Positions(NamedTuple):
    """The inputs at each position; the loop over chunks adds a leading axis."""

    teacher_hidden: Float[Array, "*chunks B T E"] | None
    targets: Int[Array, "*chunks B T"]
    mask: Bool[Array, "*chunks B T"]
    target_mask: Bool[Array, "*chunks B T"]


@dataclasses.dataclass(frozen=True)
class _Settings:
    temperature: float
    text_weight: Number
    chunk: int


def token_losses(
    student: Head,
    teacher: Head | None,
    *,
    targets: Int[Array, "B T"],
    mask: Bool[Array, "B T"],
    target_mask: Bool[Array, "B T"],
    temperature: float = 1.0,
    text_weight: Number = 0.0,
    chunk: int | None = None,
) -> TokenLosses:
    """Returns the sums of the losses over the positions of a batch.

    Only `main` has gradients, and only for the student.

    Args:
      student: hidden states and output matrix of the student.
      teacher: the same for the teacher; None for language modelling alone.
      targets: the token after each position.
      mask: positions where the distillation loss compares student and teacher.
      target_mask: positions whose next token counts in the language modelling loss.
      temperature: T; the divergence uses logits / T and is multiplied by T^2.
      text_weight: weight of the likelihood in `main`, beside the divergence.
      chunk: positions of a sequence unembedded at a time; None chooses by size.
    """
    batch, length, _ = student.hidden.shape
    if chunk is None:
        shards = 1 if sharding.in_shards(sharding.DATA) else sharding.axis_size(sharding.DATA)
        rows = -(-batch // shards)
        most = max(1, CHUNK_ELEMENTS // (rows * student.matrix.shape[0]))
        chunk = math.ceil(length / math.ceil(length / most))
    matrices = [student.matrix, student.matrix if teacher is None else teacher.matrix]
    # Gather it once, not in every chunk.
    matrices = [
        sharding.constrain(jax.lax.stop_gradient(x), sharding.MODEL, None).astype(
            student.hidden.dtype
        )
        for x in matrices
    ]
    positions = _Positions(None if teacher is None else teacher.hidden, targets, mask, target_mask)
    settings = _Settings(temperature, text_weight, min(chunk, length))
    return _losses(settings, student.hidden, student.parameter, matrices, positions)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(settings: _Settings, hidden, parameter, matrices, positions) -> TokenLosses:
    del parameter
    return _sum_chunks(settings, hidden, matrices, positions, gradients=None)[0]


def _losses_forward(settings: _Settings, hidden, parameter, matrices, positions):
    wanted = "hidden" if parameter is None else "both"
    sums, of_hidden, of_matrix = _sum_chunks(
        settings, hidden, matrices, positions, gradients=wanted
    )
    if parameter is not None:
        if parameter.shape != of_matrix.shape:
            parts = sharding.parameter_partition(("vocab", "embed"), of_matrix.shape)
            of_matrix = sharding.scatter(of_matrix, 1, parts=parts)
        of_matrix = of_matrix.astype(parameter.dtype)
    return sums, (of_hidden, of_matrix)


def _losses_backward(settings: _Settings, residuals, sums: TokenLosses):
    del settings
    of_hidden, of_matrix = residuals

    def scaled(x: Array) -> Array:
        return (x * sums.main).astype(x.dtype)

    return scaled(of_hidden), None if of_matrix is None else scaled(of_matrix), None, None


_losses.defvjp(_losses_forward, _losses_backward)


def _sum_chunks(
    settings: _Settings,
    hidden: Float[Array, "B T E"],
    matrices: list[Float[Array, "V E"]],
    positions: _Positions,
    *,
    gradients: Literal["hidden", "both"] | None,
) -> tuple[TokenLosses, Any, Any]:
    """Returns the sums, and optionally their gradients for hidden states and output matrix."""
    batch, length, _ = hidden.shape
    wide = jnp.promote_types(hidden.dtype, jnp.float32)
    count = math.ceil(length / settings.chunk)

    def chunks(x: Array) -> Array:
        """[B, T, ...] to [chunks, B, chunk, ...], with padding that the masks exclude."""
        pad = ((0, 0), (0, count * settings.chunk - length), *((0, 0),) * (x.ndim - 2))
        x = jnp.pad(x, pad).reshape(batch, count, settings.chunk, *x.shape[2:])
        return jnp.moveaxis(x, 1, 0)

    def add(carry, xs):
        total, of_matrix = carry
        hidden, positions = xs
        sums, of_logits = _chunk_losses(settings, hidden, matrices, positions)
        total = jax.tree.map(jnp.add, total, sums)
        if gradients is None:
            return (total, None), None
        of_logits = of_logits.astype(hidden.dtype)
        dot = functools.partial(jnp.einsum, preferred_element_type=wide)
        of_hidden = dot("BTV,VE->BTE", of_logits, matrices[0]).astype(hidden.dtype)
        if gradients == "both":
            of_matrix += dot("BTV,BTE->VE", of_logits, hidden)
        return (total, of_matrix), of_hidden

    zero = jnp.zeros((), wide)
    start = jnp.zeros(matrices[0].shape, wide) if gradients == "both" else None
    carry = (TokenLosses(main=zero, distillation=zero, language_modeling=zero), start)
    xs = jax.tree.map(chunks, (hidden, positions))
    (total, of_matrix), of_hidden = jax.lax.scan(add, carry, xs)
    if of_hidden is not None:
        of_hidden = jnp.moveaxis(of_hidden, 0, 1).reshape(batch, -1, hidden.shape[-1])[:, :length]
    return total, of_hidden, of_matrix


def _chunk_losses(
    settings: _Settings,
    hidden: Float[Array, "B T E"],
    matrices: list[Float[Array, "V E"]],
    positions: _Positions,
) -> tuple[TokenLosses, Float[Array, "B T V"]]:
    """Returns the sums over a chunk, and the main loss's gradient for the student's logits."""
    wide = jnp.promote_types(hidden.dtype, jnp.float32)

    def unembed(hidden, matrix):
        return jnp.einsum("BTE,VE->BTV", hidden, matrix, preferred_element_type=wide)

    all_logits = [unembed(hidden, matrices[0])]
    if positions.teacher_hidden is not None:
        all_logits.append(unembed(positions.teacher_hidden, matrices[1]))
    scale = settings.temperature
    origins, sums = _sums_of(settings, all_logits, positions.targets)
    logits, *others = (x - origin for x, origin in zip(all_logits, origins, strict=True))
    normaliser = jnp.log(sums.total)
    likelihood = normaliser - sums.chosen
    likelihood = jnp.sum(jnp.where(positions.target_mask, likelihood[..., 0], 0))
    of_text = jnp.exp(logits - normaliser) - _chosen(logits, positions.targets)
    of_text = jnp.where(positions.target_mask[..., None], of_text, 0)
    if not others:
        return TokenLosses(likelihood, jnp.zeros((), wide), likelihood), of_text
    logits, others = logits / scale, others[0] / scale
    weight, totals = jnp.exp(logits), sums.weights
    difference, shift = logits - others, jnp.log(totals[0]) - jnp.log(totals[1])
    divergence = sums.difference / totals[0] - shift
    gradient = weight / totals[0] * (difference - shift - divergence)
    distillation = scale**2 * jnp.sum(jnp.where(positions.mask, divergence[..., 0], 0))
    gradient = scale * jnp.where(positions.mask[..., None], gradient, 0)
    main = distillation
    if settings.text_weight:
        main += settings.text_weight * likelihood
        gradient += settings.text_weight * of_text
    return TokenLosses(main, distillation, likelihood), gradient


class _Sums(NamedTuple):
    """Sums over the vocabulary, [B, T, 1], of logits minus an origin.

    Attributes:
      highest: the maximum (not a sum) of the student, and of the teacher if there is one.
      total: of exp(student).
      chosen: the student's logit of the target.
      weights: of exp(student / temperature) and of exp(teacher / temperature).
      difference: of student - teacher, weighted by the student.
    """

    highest: list[Array]
    total: Array
    chosen: Array
    weights: list[Array]
    difference: Any  # None without a teacher


def _sums_of(settings: _Settings, all_logits: list[Array], targets: Array) -> tuple[Any, _Sums]:
    """Returns the origins that were subtracted, and the sums.

    Any origin works if no exponential overflows; finding the maximum of all logits first would take
    as long as the sums. The origin is the maximum of a part of them. The sums show whether another
    logit is far above it; if so, they are computed again with the maximum of all.
    """
    vocabulary = all_logits[0].shape[-1]
    split = sharding.axis_size(sharding.MODEL) > 1  # the part would lie on one device
    part = vocabulary if split else math.ceil(vocabulary / _PART_OF_ORIGIN)

    def sums(origins) -> _Sums:
        """Computes all sums from the same arrays, so the compiler fuses them into one pass."""

        def total(x):
            return jnp.sum(x, -1, keepdims=True)

        below = [x - origin for x, origin in zip(all_logits, origins, strict=True)]
        highest = [jnp.max(x, -1, keepdims=True) for x in below]
        chosen = total(jnp.where(_chosen(below[0], targets), below[0], 0))
        first = total(jnp.exp(below[0]))
        if len(below) == 1:
            return _Sums(highest, first, chosen, [], None)
        student, teacher = (x / settings.temperature for x in below)
        weights = [jnp.exp(student), jnp.exp(teacher)]
        weighted = weights[0] * (student - teacher)
        return _Sums(highest, first, chosen, [total(x) for x in weights], total(weighted))

    origins = [jnp.max(x[..., :part], -1, keepdims=True) for x in all_logits]
    quick = sums(origins)
    if part == vocabulary:
        return origins, quick
    near = jnp.all(jnp.stack(quick.highest) < _FAR * min(settings.temperature, 1.0))

    def again():
        exact = [x + highest for x, highest in zip(origins, quick.highest, strict=True)]
        return exact, sums(exact)

    return jax.lax.cond(near, lambda: (origins, quick), again)


def _chosen(logits: Array, targets: Array) -> Bool[Array, "B T V"]:
    return jax.lax.broadcasted_iota(jnp.int32, logits.shape, 2) == targets[..., None]
