"""Which tokens each head keeps, and until when, for every policy.

Sequences go token by token through the paged cache, prompts as prompts and the rest as an answer,
under a recorded policy (`recording`).

    gone[l, b, k, j]    position of the first query that no longer sees token j

    window 1, and tokens 0 and 2 are evicted when they leave it:
    # tokens: 0 1 2 3 4   gone: [2, NEVER, 4, NEVER, NEVER]

A token cut after the last query has `gone` T; a token still in the cache has NEVER. For policies
that merge, "gone" means that the next token took its slot, which holds the mean of both.
"""

import dataclasses

import numpy as np
from jaxtyping import Bool, Int

from dms_jax.analysis.recording import Recording
from dms_jax.checks import Count, check, require
from dms_jax.errors import DataError
from dms_jax.generation import Engine
from dms_jax.generation.prefill import PrefillBatch, Shape
from dms_jax.generation.runner import Runner
from dms_jax.model.language_model import LanguageModel, check_tokens, whole_numbers
from dms_jax.policies import Policy
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
    """

    policy: Policy
    tokens: Int[np.ndarray, "B T"]
    prompt_lengths: Int[np.ndarray, " B"]
    gone: Int[np.ndarray, "L B K T"]

    @property
    def length(self) -> int:
        """T, the number of tokens of each sequence."""
        return self.gone.shape[-1]

    def live(self) -> Int[np.ndarray, "L B K T"]:
        """Returns the number of slots of each row in use while each token attended."""
        left = np.zeros((*self.gone.shape[:-1], self.length + 1), np.int64)
        rows = np.indices(self.gone.shape)[:-1]
        np.add.at(left, (*rows, np.minimum(self.gone, self.length)), 1)
        return np.arange(1, self.length + 1) - np.cumsum(left, -1)[..., : self.length]


def retention(
    model: LanguageModel,
    tokens: Int[np.ndarray, "B T"],
    *,
    policy: Policy | str | None = None,
    prompt_lengths: Int[np.ndarray, " B"] | None = None,
    page_size: int = 16,
) -> Retention:
    """Runs sequences through the cache and returns the tokens that each head kept.

    Args:
      model: the model.
      tokens: token ids of sequences of one length.
      policy: the policy; the checkpoint's if None.
      prompt_lengths: number of tokens that run as a prompt, for policies that treat prompts
        differently; 0 if None. A budget given as a `compression_ratio` is a share of the tokens.
      page_size: slots per page.

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
        raise DataError(f"retention needs token ids of shape [B, T], got {list(tokens.shape)}.")
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
    engine = Engine(
        dataclasses.replace(model, policy=policy),  # checked above
        Recording(policy, length),
        num_lanes=batch,
        max_tokens=length,
        page_size=page_size,
        table_width=-(-length // page_size),
    )
    with engine.runner.working():
        gone = _run(engine.runner, tokens, prompts)
    return Retention(policy=policy, tokens=tokens, prompt_lengths=prompts, gone=gone)


def _run(
    runner: Runner, tokens: Int[np.ndarray, "B T"], prompts: Int[np.ndarray, " B"]
) -> Int[np.ndarray, "L B K T"]:
    """Feeds the tokens one by one, and returns `Retention.gone`."""
    batch, length = map(int, tokens.shape)
    rows = runner.reservation.lengths.shape
    gone = np.full((*rows, length), NEVER)
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
        runner.reservation.trim()
        seen = np.asarray(runner.cache.row_state.seen)
        gone[before & ~seen] = position
        before = seen
    gone[before & ~_held(runner, length)] = length
    return gone


def _held(runner: Runner, length: int) -> Bool[np.ndarray, "L B K T"]:
    """Returns the tokens in the cache now, after any cut."""
    lengths, allocator = runner.reservation.lengths, runner.reservation.allocator
    held = np.zeros((*lengths.shape, length), bool)
    pages = np.asarray(runner.cache.page_state.positions)
    for row in np.ndindex(lengths.shape):
        reserved = allocator.table[row][: allocator.reserved[row]]
        held[(*row, pages[reserved].reshape(-1)[: lengths[row]])] = True
    return held
