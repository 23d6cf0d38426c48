"""Delayed eviction: a marked token leaves the cache when it leaves the window.

The mechanism of all policies in which the lifetime of a token does not depend on attention: DMS (a
learned decision), StreamingLLM (evicts everything but the sinks), random eviction, and DMC (window
0: a token that merges with the next one is evicted at once, and the merged token takes its slot).

    marks[i] is the decision of token i about key i - shift
    key j is visible to query i  iff  i - j <= window  or  key j is not marked

Slots are reused in place. With W = window + 1, the token at position t pushes the candidate t - W
out of the window. If the candidate is marked, the new token takes its slot and the row does not
grow; otherwise the new token is appended. A step first applies t's mark to its key and then checks
the candidate, so that window 0 works.

No eviction frees a page: a dead slot is reused in place. Pages come back because the host reserves
for the worst case, a row that appends every token, and trims the difference once it knows the row's
length (`cache/pages.py`).

    w=2, marks that evict keys 1, 2 and 5 of 8; slots after t = 4, 5, 7:
    # t=4: [0, 4, 2, 3]     t=5: [0, 4, 5, 3]     t=7: [0, 4, 5, 3, 6, 7]

State: a ring of the last W tokens of each row, 2 * slot + marked, at index position mod W.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from dms_jax.policies.base import Policy, hard_marks
from dms_jax.policies.values import (
    FOREVER,
    NOT_STORED,
    CacheShape,
    Chunk,
    Footprint,
    Placement,
    PolicyState,
    base_rows,
    with_base_rows,
)

# Row state: the last W tokens of each row, each as 2 * slot + marked (one array needs one gather
# and one scatter per step instead of two).
Ring = Int[Array, "*rows W"]


@dataclasses.dataclass(frozen=True)
class DelayedEviction(Policy):
    """Base of policies that mark tokens for eviction independently of attention."""

    @property
    def mark_shift(self) -> int:
        """Distance from a key to the token that marks it, between 0 and visible_window + 1."""
        return 0

    @property
    def always_kept(self) -> int:
        """Slots of a long row that decisions never free: the current token and its window."""
        return self.visible_window + 1

    @property
    def can_undo(self) -> bool:
        """See `Policy.can_undo`: unless a token decides about the slot that it takes."""
        return self.mark_shift <= self.visible_window

    def frozen_slots(self, rows, lengths, seen):
        """See `Policy.frozen_slots`: those before the slots of the last W tokens.

        A token takes a new slot or one of these, so the first of them never moves back.
        """
        ring = base_rows(rows)
        held = jnp.arange(ring.shape[-1]) < seen[:, None, None]
        first = jnp.where(held, ring // 2, FOREVER).min(-1)
        return jnp.minimum(first, lengths)

    def overwritten(self, rows, seen, count):
        """See `Policy.overwritten`: those of the tokens that leave the window, marked or not."""
        ring = base_rows(rows)
        position = seen[:, None] + jnp.arange(count)  # token i pushes out the one W before it
        index = jnp.broadcast_to((position % ring.shape[-1])[:, None], (*ring.shape[:-1], count))
        slots = jnp.take_along_axis(ring, index, -1) // 2
        return jnp.where((position >= ring.shape[-1])[:, None], slots, FOREVER)

    def share_kept(self, compression_ratio: float | int) -> float:
        """Returns the expected fraction of tokens kept when they leave the window."""
        return 1 / compression_ratio if self.retrofit.needed else 1.0

    def footprint(self, tokens, *, page_size, group=1, compression_ratio=1) -> Footprint:
        """Returns the slots that are always kept plus the expected number of other kept tokens."""
        always = min(self.always_kept, tokens)
        slots = always + (tokens - always) * self.share_kept(compression_ratio)
        return Footprint(slots, 0, None, reads=slots, attended=slots)

    def init_state(self, shape: CacheShape) -> PolicyState:
        """Returns an empty ring for each row."""
        return PolicyState(rows=jnp.zeros((*shape.rows, self.visible_window + 1), jnp.int32))

    def write(self, state: PolicyState, chunk: Chunk) -> tuple[PolicyState, Placement]:
        """Gives each token the slot of the marked token that it pushes out, or a new one."""
        ring = base_rows(state.rows)
        size, shift, first = self.visible_window + 1, self.mark_shift, chunk.first[:, None]
        valid = chunk.valid
        num_tokens = valid.shape[-1]
        marks = hard_marks(chunk.decisions) & valid
        index = jnp.arange(num_tokens)
        ring_index = (first + index) % size  # [B, T]

        # The candidate that token i pushes out is at position first + i - W. Its mark was made
        # by token i - (W - shift) of this chunk, or is already in the ring.
        entry = jnp.take_along_axis(ring, ring_index[:, None, :], axis=-1)
        delay = size - shift
        marked = jnp.concatenate(
            [entry[..., : min(delay, num_tokens)] % 2 == 1, marks[..., :-delay]], axis=-1
        )[..., :num_tokens] if delay else marks  # fmt: skip
        has_candidate = (first + index >= size)[:, None]
        reuse = valid & has_candidate & marked
        fresh = valid & ~reuse
        live = chunk.lengths[..., None] + jnp.cumsum(fresh, -1, dtype=jnp.int32)
        slots = _inherit_slots(reuse, live - 1, entry // 2, size)

        # A token whose own successor (W later) reuses its slot is gone by the end of the chunk.
        gone = shift_left(reuse, size)
        placement = Placement(
            slots=jnp.where(valid & ~gone, slots, NOT_STORED),
            live=live,
            evicted=shift_left(marks, shift),
            past_until=self._past_until(ring, marks, chunk),
        )
        ring = self._advance(ring, slots, marks, chunk)
        return dataclasses.replace(state, rows=with_base_rows(state.rows, ring)), placement

    def evicted(self, chunk: Chunk) -> Bool[Array, "B K T"]:
        """Returns whether each key j is evicted, which token j + shift decides."""
        return shift_left(hard_marks(chunk.decisions), self.mark_shift)

    def rows_at(
        self, rows, slots: Int[Array, "*rows W"], evicted: Bool[Array, "*rows W"], seen: int
    ):
        """Returns the row state at a given length without running the tokens, for benchmarks.

        Args:
          rows: row state at any length.
          slots: slots of the last W tokens, oldest first.
          evicted: whether each token is evicted when it leaves the window.
          seen: length of the sequence, at least W.
        """
        entries = (2 * slots + evicted).astype(jnp.int32)
        return with_base_rows(rows, jnp.roll(entries, seen % (self.visible_window + 1), axis=-1))

    def _past_until(self, ring: Ring, marks, chunk: Chunk) -> Int[Array, "B K S"]:
        """Returns the last query of the chunk that sees each earlier slot."""
        size, shift, first = self.visible_window + 1, self.mark_shift, chunk.first[:, None]
        age = jnp.arange(size)  # entry r holds position first - W + r; token r pushes it out
        ring_index = ((first + age) % size)[:, None]
        entry = jnp.take_along_axis(ring, ring_index, axis=-1)
        slot, marked = entry // 2, entry % 2 == 1
        # Entry r is decided by token r - (W - shift) of this chunk if that is not negative.
        decided = _pad_or_cut(marks, shift)
        delay = size - shift
        if shift:
            marked = jnp.concatenate([marked[..., :delay], marked[..., delay:] | decided], axis=-1)
        exists = (first - size + age >= 0)[:, None]
        until = jnp.where(marked & exists, age - 1, FOREVER)
        batch, heads = slot.shape[:2]
        rows = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
        target = jnp.where(exists, slot, chunk.num_slots)  # out of range: dropped
        return (
            jnp.full((batch, heads, chunk.num_slots), FOREVER, jnp.int32)
            .at[(*rows, target)]
            .set(until.astype(jnp.int32), mode="drop")
        )

    def _advance(self, ring: Ring, slots, marks, chunk: Chunk) -> Ring:
        """Sets the chunk's marks of earlier tokens in the ring, then adds its last W tokens."""
        size, shift, first = self.visible_window + 1, self.mark_shift, chunk.first[:, None]
        num_tokens = marks.shape[-1]
        end = chunk.count[:, None]

        def entries_at(index, keep, new):
            """Sets the ring's entries at positions relative to the chunk; others are dropped."""
            index = jnp.where(keep, (first + index) % size, size)[:, None]
            if num_tokens == 1:  # without a scatter, XLA fuses it with the rest of the step
                return jnp.where(jnp.arange(size) == index, new(ring), ring)
            batch, heads = ring.shape[:2]
            rows = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
            place = ring.at[(*rows, index)]
            return place.set(new(place.get(mode="clip")), mode="drop")

        if shift:
            late = jnp.arange(min(shift, num_tokens))
            index = late[None] - shift  # before the chunk
            keep = (late < end) & (index >= end - size) & (first + index >= 0)
            late_marks = marks[..., : len(late)].astype(ring.dtype)
            ring = entries_at(index, keep, lambda old: old + late_marks)
        own = jnp.arange(num_tokens)[None]
        keep = (own < end) & (own >= end - size)
        return entries_at(own, keep, lambda _: 2 * slots + shift_left(marks, shift))


def shift_left(x: Shaped[Array, "B K T"], by: int) -> Shaped[Array, "B K T"]:
    """Moves entry i + by to i, and fills with zeros.

    # by=1  In: [1, 0, 1]  Out: [0, 1, 0]
    """
    return jnp.pad(x[..., by:], ((0, 0), (0, 0), (0, min(by, x.shape[-1]))))


def _pad_or_cut(x: Bool[Array, "B K T"], length: int) -> Bool[Array, "B K n"]:
    """Returns the first `length` entries of x, padded with False."""
    x = x[..., :length]
    return jnp.pad(x, ((0, 0), (0, 0), (0, length - x.shape[-1])))


def _inherit_slots(
    reuse: Bool[Array, "B K T"],
    fresh: Int[Array, "B K T"],
    ring_slots: Int[Array, "B K T"],
    size: int,
) -> Int[Array, "B K T"]:
    """Returns the slot of each token: a new one, or that of the token W earlier, recursively.

    Tokens i, i + W, i + 2W, ... form a chain in which a token may inherit its predecessor's slot.
    # W=2  reuse: [0, 0, 1, 0, 1, 1]  fresh: [5, 6, -, 7, -, -]  Out: [5, 6, 5, 7, 5, 7]
    """
    num_tokens = reuse.shape[-1]
    if num_tokens <= size:
        return jnp.where(reuse, ring_slots, fresh)
    links = -(-num_tokens // size)
    pad = ((0, 0), (0, 0), (0, links * size - num_tokens))

    def chains(x):
        return jnp.pad(x, pad).reshape(*x.shape[:2], links, size)

    link = jnp.arange(links)[:, None]
    origin = jax.lax.cummax(jnp.where(chains(reuse), -1, link), axis=2)
    own = jnp.take_along_axis(chains(fresh), jnp.maximum(origin, 0), axis=2)
    inherited = chains(ring_slots)[:, :, :1]
    slots = jnp.where(origin < 0, inherited, own)
    return slots.reshape(*reuse.shape[:2], -1)[..., :num_tokens]
