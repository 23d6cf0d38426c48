"""A self-contained HTML page that shows which tokens of a text the heads keep, step by step.

Policies are shown side by side, each with its compression and a map of its heads. A slider moves
the query; tokens are coloured by the share of heads that hold them at that step, or in two colours
for a selected head. Colours follow the reader's dark or light mode. The page loads nothing.
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
from dms_jax.policies import Policy, Vanilla


@dataclasses.dataclass(frozen=True)
class View:
    """One policy's treatment of one text.

    Attributes:
      name: heading.
      explanation: a sentence about the policy.
      gone: see `Retention.gone`.
      merges: whether evicted tokens are merged into a later one's slot.
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
    """Returns the first sentence of a policy's docstring, and of the policy under it if any."""
    does = (type(policy).__doc__ or policy.name).strip().splitlines()[0]
    over = getattr(policy, "over", None)
    return does if over in (None, Vanilla()) else f"{does} {explain(over)}"


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> list[str]:
    """Returns the text that each token adds, spaces included; joined they give the whole text.

    A single token may decode without its space, or to part of a character. So each token's text is
    the difference between decoding the tokens with and without it.
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
    """Returns an HTML page that shows which tokens of a text each head holds.

    Args:
      tokens: text of each token, from `token_texts`.
      views: the views of policies, shown side by side.
      title: heading.
      note: a sentence below it.
      prompt_length: number of prompt tokens, after which a mark is drawn.

    Raises:
      ConfigError: there is no view, a view has another number of tokens, or the prompt is longer.
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
    # Inside a string, "</script" would end the script, and "<!--<script" would hide its end.
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
