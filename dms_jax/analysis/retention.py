"""Which tokens each head keeps, evicts, merges and reads, and when, for every policy.

Sequences go token by token through the paged cache, prompts as prompts and the rest as an answer,
under a recorded policy (`recording`). Everything else follows from two arrays:

    gone[l, b, k, j]    position of the first query that no longer sees token j
    reads[l, b, k, j]   how often a query head read j's value in a decode step

    window 1, and tokens 0 and 2 are evicted when they leave it:
    # tokens: 0 1 2 3 4   gone: [2, NEVER, 4, NEVER, NEVER]

A token cut after the last query has `gone` T; a token still in the cache has NEVER. For policies
that merge, "gone" means that the next token took its slot, which holds the mean of both.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Float, Int

from dms_jax.analysis.recording import Recording, selects
from dms_jax.checks import Count, check, require
from dms_jax.errors import DataError
from dms_jax.generation import Engine
from dms_jax.generation.prefill import PrefillBatch, Shape
from dms_jax.generation.runner import Runner
from dms_jax.model.language_model import LanguageModel, check_tokens, whole_numbers
from dms_jax.policies import Policy
from dms_jax.policies.merging import Merging
from dms_jax.policies.selective import SelectiveReading
from dms_jax.policies.values import FOREVER

NEVER = FOREVER  # later than any query


@dataclasses.dataclass(frozen=True)
class Retention:
    """The tokens held by the rows of B sequences of T tokens: L layers, K KV heads.

    Attributes:
      policy: the policy that ran.
      tokens: the token ids.
      prompt_lengths: number of prompt tokens of each sequence.
      gone: position of the first query that does not see the token; NEVER for those in the cache.
      reads: number of times a query head read the token's value after the prompt; None if the
        policy reads everything that it holds.
      num_query_heads: query heads per KV head (G).
    """

    policy: Policy
    tokens: Int[np.ndarray, "B T"]
    prompt_lengths: Int[np.ndarray, " B"]
    gone: Int[np.ndarray, "L B K T"]
    reads: Int[np.ndarray, "L B K T"] | None
    num_query_heads: int

    @property
    def length(self) -> int:
        """T, the number of tokens of each sequence."""
        return self.gone.shape[-1]

    @property
    def merges(self) -> bool:
        """Whether evicted tokens are part of the mean in a later token's slot."""
        policy = self.policy.over if isinstance(self.policy, SelectiveReading) else self.policy
        return isinstance(policy, Merging)

    def lifetimes(self) -> Int[np.ndarray, "L B K T"]:
        """Returns the number of queries that saw each token, its own included."""
        return np.minimum(self.gone, self.length) - np.arange(self.length)

    def seen_by(self, query: int) -> Bool[np.ndarray, "L B K T"]:
        """Returns the tokens that the query at this position saw (the cache's content then)."""
        return (self.gone > query) & (np.arange(self.length) <= query)

    def live(self) -> Int[np.ndarray, "L B K T"]:
        """Returns the number of slots of each row in use while each token attended."""
        left = np.zeros((*self.gone.shape[:-1], self.length + 1), np.int64)
        rows = np.indices(self.gone.shape)[:-1]
        np.add.at(left, (*rows, np.minimum(self.gone, self.length)), 1)
        return np.arange(1, self.length + 1) - np.cumsum(left, -1)[..., : self.length]

    def read_shares(self) -> Float[np.ndarray, "L B K T"]:
        """Returns each token's reads as a share of its possible reads.

        Possible reads are the decode steps after the prompt with the token in the cache, times the
        query heads of the group. NaN for tokens gone before, or without such steps.
        """
        first = np.maximum(np.arange(self.length), self.prompt_lengths[:, None])[None, :, None]
        steps = np.maximum(np.minimum(self.gone, self.length) - first, 0)
        reads = steps * self.num_query_heads if self.reads is None else self.reads
        with np.errstate(invalid="ignore"):
            return np.where(steps > 0, reads / (steps * self.num_query_heads), np.nan)


def retention(
    model: LanguageModel,
    tokens: Int[np.ndarray, "B T"],
    *,
    policy: Policy | str | None = None,
    prompt_lengths: Int[np.ndarray, " B"] | None = None,
    page_size: int = 16,
) -> Retention:
    """Runs sequences through the cache and returns the tokens that each head kept and read.

    Args:
      model: the model.
      tokens: token ids of sequences of one length.
      policy: the policy; the checkpoint's if None.
      prompt_lengths: number of tokens that run as a prompt, for policies that treat prompts
        differently; 0 if None. A budget given as a `compression_ratio` is a share of the tokens.
      page_size: slots per page; affects the reads of Quest.

    Raises:
      ConfigError: the policy or the page size does not fit, or the model is on a mesh.
      DataError: tokens or lengths of prompts are malformed.
    """
    require(
        model.mesh is None,
        "retention reads the cache of one device; load the model without a mesh.",
    )
    require(
        model.config.window is None,
        "retention shows the tokens that a policy keeps in all layers, and some layers of this "
        "model have a window under any policy.",
    )
    tokens = whole_numbers("token ids", tokens)
    if tokens.ndim != 2 or not tokens.size:
        raise DataError(f"retention wants token ids of shape [B, T], got {list(tokens.shape)}.")
    check_tokens(tokens, model.config)
    batch, length = tokens.shape
    prompts = np.zeros(batch, int) if prompt_lengths is None else prompt_lengths
    prompts = whole_numbers("prompt_lengths", prompts)
    if prompts.shape != (batch,) or (prompts < 0).any() or (prompts > length).any():
        raise DataError(
            f"prompt_lengths must be {batch} numbers between 0 and {length}, got "
            f"{prompts.tolist()}."
        )
    page_size = check("retention: page_size", page_size, Count)
    policy = model.resolve_policy(policy)
    recorder = Recording(policy, length, selects(policy))
    engine = Engine(
        dataclasses.replace(model, policy=policy),  # checked above
        recorder,
        num_lanes=batch,
        max_tokens=length,
        page_size=page_size,
        table_width=-(-length // page_size),
    )
    with engine.runner.working():
        gone, reads = _run(engine.runner, tokens, prompts)
    return Retention(
        policy=policy,
        tokens=tokens,
        prompt_lengths=prompts,
        gone=gone,
        reads=reads if recorder.selects else None,
        num_query_heads=model.config.group_size,
    )


def _run(
    runner: Runner, tokens: Int[np.ndarray, "B T"], prompts: Int[np.ndarray, " B"]
) -> tuple[Int[np.ndarray, "L B K T"], Int[np.ndarray, "L B K T"]]:
    """Feeds the tokens one by one, and returns `Retention.gone` and `Retention.reads`."""
    batch, length = map(int, tokens.shape)
    rows = runner.reservation.lengths.shape
    gone = np.full((*rows, length), NEVER)
    reads = np.zeros((*rows, length), int)
    before = np.zeros((*rows, length), bool)
    runner.set_max_lengths(dict.fromkeys(range(batch), length))
    for position in range(length):
        in_prompt = (position < prompts) & (runner.policy.parallel == "prompts")
        for prompt in (True, False):
            lanes = np.flatnonzero(in_prompt == prompt).tolist()
            if not lanes:
                continue
            extra = np.zeros(batch, int)
            extra[lanes] = 1
            runner.reservation.reserve(extra, prompt=prompt)
            # Lanes of the other kind take part without tokens, for one shape and one compilation.
            part = {lane: tokens[lane, position : position + extra[lane]] for lane in range(batch)}
            shape = Shape(width=1, entries=batch, places=None, one_pass=prompt)
            ends = [lane for lane in lanes if prompt and position + 1 == prompts[lane]]
            runner.extend(PrefillBatch(part, shape, prompt, ends))
            if not prompt and runner.cache.row_state.readers is not None:
                reads[:, lanes] += np.asarray(runner.cache.row_state.readers)[:, lanes]
        runner.reservation.trim()
        seen = np.asarray(runner.cache.row_state.seen)
        gone[before & ~seen] = position
        before = seen
    gone[before & ~_held(runner, length)] = length
    return gone, reads


def _held(runner: Runner, length: int) -> Bool[np.ndarray, "L B K T"]:
    """Returns the tokens in the cache now, after any cut."""
    lengths, allocator = runner.reservation.lengths, runner.reservation.allocator
    held = np.zeros((*lengths.shape, length), bool)
    pages = np.asarray(runner.cache.page_state.positions)
    for row in np.ndindex(lengths.shape):
        reserved = allocator.table[row][: allocator.reserved[row]]
        held[(*row, pages[reserved].reshape(-1)[: lengths[row]])] = True
    return held
