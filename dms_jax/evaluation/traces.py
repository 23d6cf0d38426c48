"""Cut an answer to a shorter length: its first tokens, with their reads and their peak.

A token depends on the tokens before it, on the draw at its position and on what the policy kept. So
an answer of at most l tokens is the first l tokens of a longer one, with the cache use of those
steps. The exception is a policy whose budget is a share of prompt and longest answer: each length
has another budget, and the answers are no prefixes of each other (`depends_on_length`). As between
any two runs, rounding may depend on the batch (`generation.sampling`).
"""

import dataclasses
from typing import Any

from dms_jax.generation import Completion
from dms_jax.policies import Policy


@dataclasses.dataclass(frozen=True)
class Trace:
    """A request's use of the cache, step by step.

    Attributes:
      rows: L * K; the other figures are totals over these rows.
      prompt_peak: the most live entries after any token of the prompt.
      live, reads: live entries after each decode step, and entries that it read. Every generated
        token but the last has a step.
    """

    rows: int
    prompt_peak: int
    live: list[int]
    reads: list[int]


@dataclasses.dataclass(frozen=True)
class Answer:
    """The answer of one chain.

    Attributes:
      completion: its text, tokens and usage.
      trace: its usage step by step; None if not recorded.
    """

    completion: Completion
    trace: Trace | None = None


@dataclasses.dataclass(frozen=True)
class Chain:
    """An answer cut to a length.

    Attributes:
      text: its text.
      new_tokens: tokens generated.
      reads, peak: see `Usage.kv_reads` and `Usage.peak_tokens`.
      ended: whether it ended by an end token.
    """

    text: str
    new_tokens: int
    reads: float
    peak: float
    ended: bool


def cut(answer: Answer, length: int, tokenizer: Any) -> Chain:
    """Cuts an answer to at most `length` new tokens."""
    done, trace = answer.completion, answer.trace
    if len(done.tokens) <= length:
        return Chain(
            text=done.text,
            new_tokens=len(done.tokens),
            reads=done.usage.kv_reads,
            peak=done.usage.peak_tokens,
            ended=done.finish_reason == "end",
        )
    assert trace is not None
    text = tokenizer.decode(done.tokens[:length], skip_special_tokens=True)
    if text and done.text.startswith(" ") and not text.startswith(" "):
        text = f" {text}"  # decoding a list may drop the space of its first token
    return Chain(
        text=text,
        new_tokens=length,
        reads=sum(trace.reads[: length - 1]) / trace.rows,
        peak=max([trace.prompt_peak, *trace.live[: length - 1]]) / trace.rows,
        ended=False,
    )


def depends_on_length(policy: Policy) -> bool:
    """Whether a policy takes a share of the longest answer."""
    return policy.for_length(1) != policy
