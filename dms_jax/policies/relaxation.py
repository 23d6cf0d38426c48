"""The Gumbel-sigmoid relaxation of a binary decision, and its straight-through form.

    l = (a + g1 - g2) / tau,   alpha = sigmoid(l),   g1, g2 ~ Gumbel(0, 1)          (DMS, eq. 1)

The difference of two Gumbel variables is a Logistic(0, 1) variable (`jax.random.logistic`).
The noise is divided by the temperature too, so P(alpha > 1/2) = sigmoid(a) for any tau.
"""

import jax
from jaxtyping import Array, Float


def noisy_logits(
    logits: Float[Array, "*shape"],
    noise: Float[Array, "*shape"],
    temperature: float | Float[Array, ""],
) -> Float[Array, "*shape"]:
    """Returns l = (a + noise) / tau."""
    return (logits + noise.astype(logits.dtype)) / temperature


def straight_through(noisy: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns hard decisions 1[sigmoid(l) > 1/2] with the gradient of sigmoid(l).

    # In: [-3.0, 0.2]  Out: [0.0, 1.0], gradients [0.045, 0.248]
    """
    soft = jax.nn.sigmoid(noisy)
    hard = (noisy > 0).astype(noisy.dtype)
    return hard + (soft - jax.lax.stop_gradient(soft))  # exact because of the parentheses


def log_keep(noisy: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns log(1 - alpha) = log_sigmoid(-l), accurate where alpha rounds to 1."""
    return jax.nn.log_sigmoid(-noisy)
