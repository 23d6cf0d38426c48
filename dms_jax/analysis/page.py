"""A self-contained HTML page of a text and of what the heads kept of it, step by step.

One or more policies side by side, each with its compression and a map of its heads. A slider moves
the query; tokens are coloured by the share of the heads that hold them then, or in two colours for
the head that is chosen. Colours follow the reader's dark or light mode. Nothing is loaded from
anywhere.
"""

import dataclasses
import functools
import html
import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from dms_jax.analysis.retention import NEVER, Retention
from dms_jax.checks import require
from dms_jax.policies import (
    DMC,
    DMS,
    H2O,
    TOVA,
    FixedPooling,
    KCache,
    KVpop,
    KVzap,
    Policy,
    Quest,
    RandomEviction,
    StreamingLLM,
    Vanilla,
)
from dms_jax.policies.periodic_eviction import AnswerEviction, PeriodicEviction


@dataclasses.dataclass(frozen=True)
class View:
    """What one policy did with one text.

    Attributes:
      name: heading.
      explanation: a sentence that says when a token goes.
      gone: see `Retention.gone`.
      merges: whether tokens that are gone are part of a later one's slot.
      read: share of the possible reads of each token's value; None if everything is read.
    """

    name: str
    explanation: str
    gone: Int[np.ndarray, "L K T"]
    merges: bool
    read: Float[np.ndarray, "L K T"] | None

    @classmethod
    def of(cls, found: Retention, name: str | None = None, *, sequence: int = 0) -> "View":
        """Returns the view of one sequence; its name is the policy's if not given.

        Raises:
          ConfigError: there is no such sequence.
        """
        count = found.gone.shape[1]
        require(
            0 <= sequence < count,
            f"View.of: sequence {sequence}: there are {count}, the first is 0.",
        )
        return cls(
            name=found.policy.name if name is None else name,
            explanation=explain(found.policy),
            gone=found.gone[:, sequence],
            merges=found.merges,
            read=None if found.reads is None else found.read_shares()[:, sequence],
        )


def explain(policy: Policy) -> str:
    """Returns a sentence for readers that says when a token leaves the cache of this policy."""
    match policy:
        case Vanilla():
            return "Nothing is evicted: every head holds every token."
        case DMS():
            return (
                f"Each head learned which tokens it can do without. The last {policy.window + 1} "
                "tokens are its window, which it always holds; a token that it gave up leaves "
                "when it falls out of the window."
            )
        case KVzap():
            return (
                "A scorer learned how much later text attends to each token. The last "
                f"{policy.window + 1} tokens are the window, which is always held; behind it every "
                "token is gone whose score is below the threshold."
            )
        case KVpop():
            return (
                "A scorer learned how much later text attends to each token. The last "
                f"{policy.window} tokens are safe; above its budget, each step evicts the token "
                "with the lowest score behind them."
            )
        case DMC():
            return (
                "Each head learned to merge neighbours: a token that the next one joins shares "
                "its slot from then on, as a weighted mean. There is no window."
            )
        case FixedPooling():
            return f"Every {policy.every} tokens in a row share a slot that holds their mean."
        case StreamingLLM():
            return (
                f"The first {policy.sinks} tokens and the most recent ones stay; everything "
                "between them is evicted, in every head alike."
            )
        case RandomEviction():
            return (
                f"The last {policy.window + 1} tokens are the window, which is always held; "
                f"behind it chance evicted {policy.rate:.0%} of them."
            )
        case TOVA():
            return (
                "Above its budget, each step evicts the one token that the newest query attended "
                "to least. There is no window: even a recent token may go."
            )
        case H2O():
            return (
                "Half of the budget are the most recent tokens; the other half are those that "
                "gathered the most attention so far."
            )
        case Quest():
            return (
                f"The cache is {_over(policy)}; each query head reads only the pages that promise "
                "the most attention. Colours show what was read after the prompt."
                f"{_below(policy)}"
            )
        case KCache():
            return (
                f"The cache is {_over(policy)}; each query head reads every key and fetches the "
                f"values of its {policy.top if policy.compression_ratio is None else 'few'} "
                "largest weights. Colours show which values were fetched after the prompt."
                f"{_below(policy)}"
            )
        case AnswerEviction():
            return (
                "The prompt is held in full; each time that so many tokens have been added to a "
                "full row, it is cut to its budget by scores."
            )
        case PeriodicEviction():
            return (
                "The prompt is held in full until its end; then each row is cut to its budget by "
                "scores, and again each time that so many tokens have been added."
            )
    doc = (type(policy).__doc__ or policy.name).strip()
    return doc.splitlines()[0]


def _over(policy: Quest | KCache) -> str:
    return "that of " + policy.over.name if policy.over != Vanilla() else "complete"


def _below(policy: Quest | KCache) -> str:
    """What the policy that holds the cache evicts."""
    return "" if policy.over == Vanilla() else f" {explain(policy.over)}"


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Returns the text that each token adds, spaces included; joined they give the whole text.

    A single token may decode without its space, or to a part of a character. So the text of all
    tokens so far is compared with the text of one token more.
    """
    texts, before = [], ""
    for end in range(1, len(tokens) + 1):
        after = tokenizer.decode(list(tokens[:end]), skip_special_tokens=True).rstrip("\ufffd")
        texts.append(after[len(before) :])
        before = after
    return texts


def eviction_page(
    tokens: Sequence[str],
    views: Sequence[View],
    *,
    title: str,
    note: str = "",
    prompt_length: int = 0,
) -> str:
    """Returns an HTML page of a text that shows what each head held of it.

    Args:
      tokens: text of each token, from `token_texts`.
      views: what each policy did with them, side by side.
      title: heading.
      note: a sentence below it.
      prompt_length: number of tokens that were a prompt, after which a mark is drawn.

    Raises:
      ConfigError: there is no view, one is of another number of tokens, or the prompt is longer.
    """
    require(bool(views), "eviction_page: give at least one view of the text (View.of).")
    for view in views:
        require(
            view.gone.shape[-1] == len(tokens),
            f"eviction_page: {view.name} is of {view.gone.shape[-1]} tokens, and the text has "
            f"{len(tokens)}.",
        )
    require(
        0 <= prompt_length <= len(tokens),
        f"eviction_page: prompt_length must lie between 0 and {len(tokens)}, got {prompt_length}.",
    )
    data = {
        "tokens": list(tokens),
        "prompt": int(prompt_length),
        "views": [_as_data(view) for view in views],
    }
    # "</script" ends the script from within a string, and "<!--<script" hides its end.
    packed = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    parts = {"TITLE": html.escape(title), "NOTE": html.escape(note), "DATA": packed}
    return re.sub("@(TITLE|NOTE|DATA)@", lambda found: parts[found[1]], _template())


def _as_data(view: View) -> dict[str, Any]:
    """Returns a view as JSON data: lifetimes, 0 for a token that never left; reads in percent."""
    length = view.gone.shape[-1]
    lifetimes = np.where(view.gone == NEVER, 0, view.gone - np.arange(length))
    read = None if view.read is None else np.nan_to_num(np.rint(100 * view.read), nan=-1)
    return {
        "name": view.name,
        "explanation": view.explanation,
        "merges": view.merges,
        "lifetimes": lifetimes.tolist(),
        "read": None if read is None else read.astype(int).tolist(),
    }


@functools.cache
def _template() -> str:
    return pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8")
