"""The tokens of a chunk concatenated, without padding.

For attention and policies, sequences of different lengths are padded on the right to one width T,
[B, T, ...]. Products and norms act on single tokens, so for them the tokens of all sequences are
concatenated in a line of N places, [1, N, ...], with only N - sum(counts) places of padding.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from dms_jax.policies.values import Tokens


@dataclasses.dataclass(frozen=True)
class Unpadded:
    """The place of each token of B sequences in a line of N places, and the token in each place.

        # In:  counts [2, 0, 3], T = 4, N = 6
        # Out: place_of   0 1 . .      token_at   0 1 8 9 10 .      last   1 1 4
        #                 . . . .
        #                 2 3 4 .

    Dots are padding: they hold an arbitrary index in range, and read as zeros. Tokens without a
    place (N < sum(counts)) would be lost; the caller, which knows the counts, must prevent that.

    Attributes:
      place_of: the place of each token in the line.
      is_token: whether a token is not padding.
      token_at: the token of each place, as an index of the flat [B * T].
      is_taken: whether a place holds a token.
      last: the place of each sequence's last token; arbitrary if it has none.
    """

    place_of: Int[Array, "B T"]
    is_token: Bool[Array, "B T"]
    token_at: Int[Array, " N"]
    is_taken: Bool[Array, " N"]
    last: Int[Array, " B"]

    @classmethod
    def of(cls, counts: Int[Array, " B"], width: int, places: int) -> "Unpadded":
        """Returns the line of the first `counts[b]` of `width` tokens of each sequence."""
        ends = jnp.cumsum(counts, dtype=jnp.int32)
        starts = ends - counts
        index, place = jnp.arange(width, dtype=jnp.int32), jnp.arange(places, dtype=jnp.int32)
        place_of = starts[:, None] + index
        is_token = (index < counts[:, None]) & (place_of < places)
        sequence = (place[:, None] >= ends).sum(1, dtype=jnp.int32)
        is_taken = sequence < len(counts)
        shift = jnp.arange(len(counts), dtype=jnp.int32) * width - starts
        token_at = place + shift.at[sequence].get(mode="clip")
        return cls(
            place_of=jnp.where(is_token, place_of, 0),
            is_token=is_token,
            token_at=jnp.where(is_taken, token_at, 0),
            is_taken=is_taken,
            last=jnp.clip(ends - 1, 0, places - 1),
        )

    def unpad(self, x: Shaped[Array, "B T *rest"]) -> Shaped[Array, "1 N *rest"]:
        """Moves values [B, T, ...] into the line, with zeros in places without a token."""
        return _take(x.reshape(-1, *x.shape[2:]), self.token_at, self.is_taken)[None]

    def pad(self, line: Shaped[Array, "1 N *rest"]) -> Shaped[Array, "B T *rest"]:
        """Moves values in line back to [B, T, ...], with zeros for padding."""
        return _take(line[0], self.place_of, self.is_token)

    def pad_tokens(self, tokens: Tokens, positions: Int[Array, "B T"]) -> Tokens:
        """Returns the tokens of a layer by sequence; those past the counts are zeros.

        Args:
          tokens: the tokens in line.
          positions: their positions by sequence.
        """

        def logits(x: Array | None) -> Array | None:
            return None if x is None else jnp.moveaxis(self.pad(jnp.moveaxis(x, 1, 2)), 2, 1)

        return Tokens(
            q=self.pad(tokens.q),
            k=self.pad(tokens.k),
            v=self.pad(tokens.v),
            positions=positions,
            layer=tokens.layer,
            adapter_logits=logits(tokens.adapter_logits),
            late_logits=logits(tokens.late_logits),
        )


def _take(x: Array, index: Int[Array, "..."], valid: Bool[Array, "..."]) -> Array:
    """Returns the rows of x at an index in range, and zeros where it is not valid.

    Index and mask are computed once, before the loop over layers. Out-of-range filling would cost a
    GPU one more kernel per layer, to find where to fill.
    """
    taken = x.at[index].get(mode="promise_in_bounds")
    return jnp.where(
        valid.reshape(*valid.shape, *[1] * (x.ndim - 1)), taken, jnp.zeros((), x.dtype)
    )
