"""`perplexity`: the loss of a model on a text, teacher-forced through the real paged cache.

The text is split into documents (at `<|endoftext|>`), and documents into windows. Each token is
predicted once. The first token of a document follows the beginning-of-sequence token; the first
token of any other window follows the last token of the window before.

    [begin] t0 t1 t2 | t3 t4 t5 | t6      windows of 3: begin t0 t1 t2, t2 t3 t4 t5, t5 t6
"""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dms_jax.checks import Count, check
from dms_jax.data import TextFiles
from dms_jax.errors import DataError
from dms_jax.evaluation.likelihood import first_token
from dms_jax.evaluation.progress import progress_bar
from dms_jax.evaluation.serving import Serving
from dms_jax.evaluation.statistics import Measured, standard_error
from dms_jax.generation import Score, score
from dms_jax.model.language_model import LanguageModel, check_model
from dms_jax.policies import Policy

_LONGEST_WINDOW = 4096  # the default; one window of 131,072 tokens would take days


@dataclasses.dataclass(frozen=True)
class Perplexity:
    """The loss on a text.

    Attributes:
      settings: path, policy and window, as JSON data.
      tokens: number of predicted tokens.
      window_nats: mean loss of each window, in nats per token.
      nats: total loss of the text.
      reads: cache entries read per token, averaged over layers and KV heads.
      peak: peak of live entries, averaged over windows, layers and KV heads.
      cache_bytes: peak bytes of pages and policy state, averaged over windows.
    """

    settings: Mapping[str, Any]
    tokens: int
    window_nats: Float[np.ndarray, " windows"]
    nats: float
    reads: float
    peak: float
    cache_bytes: float

    @classmethod
    def of(cls, scores: Sequence[Score], settings: Mapping[str, Any]) -> "Perplexity":
        """Returns the loss of scored windows."""
        nats = [-float(np.sum(each.logprobs, dtype=np.float64)) for each in scores]
        lengths = [len(each.logprobs) for each in scores]
        return cls(
            settings=settings,
            tokens=sum(lengths),
            window_nats=np.asarray(nats) / lengths,
            nats=math.fsum(nats),
            reads=sum(each.usage.kv_reads for each in scores) / sum(lengths),
            peak=float(np.mean([each.usage.peak_tokens for each in scores])),
            cache_bytes=float(np.mean([each.usage.peak_cache_bytes for each in scores])),
        )

    @property
    def loss(self) -> Measured:
        """Nats per token, with the standard error over windows."""
        return Measured(self.nats / self.tokens, standard_error(self.window_nats))

    @property
    def perplexity(self) -> float:
        """Exponential of the loss per token."""
        mean = self.nats / self.tokens
        return math.exp(mean) if mean < 700 else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Returns the figures as JSON data."""
        return {
            **self.settings,
            "tokens": self.tokens,
            "windows": len(self.window_nats),
            "loss": self.loss.to_list(),
            "perplexity": self.perplexity,
            "reads": self.reads,
            "peak": self.peak,
            "cache_bytes": self.cache_bytes,
        }


def perplexity(
    model: LanguageModel,
    path: str | pathlib.Path,
    *,
    policy: Policy | str | None = None,
    window: int | None = None,
    max_tokens: int | None = None,
    serving: Serving | None = None,
    progress: bool = False,
) -> Perplexity:
    """Predicts a text file token by token through the cache, as in decoding.

    Args:
      model: a model with a tokenizer.
      path: a text in UTF-8; `<|endoftext|>` separates documents.
      policy: the cache policy; the checkpoint's if None.
      window: tokens predicted together; None for all positions of the model, at most 4096.
      max_tokens: the most tokens to predict; all if None.
      serving: options of the cache; 64 windows at a time if None.
      progress: whether to show a progress bar on standard error.

    Raises:
      DataError: the file cannot be read or is empty, or a window exceeds the model's positions.
      CapacityError: the memory does not hold the windows that run together.
    """
    check_model(model)
    window = check("perplexity: window", window, Count | None)
    max_tokens = check("perplexity: max_tokens", max_tokens, Count | None)
    policy = model.resolve_policy(policy)
    serving = Serving.given("perplexity", serving, lanes=64)
    if model.tokenizer is None:
        raise DataError("perplexity needs a tokenizer, and this model has none.")
    positions = model.config.max_position_embeddings
    window = window or min(positions - 1, _LONGEST_WINDOW)
    if window >= positions:
        raise DataError(
            f"perplexity: a window of {window} tokens and the one before them are beyond the "
            f"model's {positions} positions."
        )
    windows, room = [], max_tokens
    for text in TextFiles(path):
        tokens = model.tokenizer.encode(text, add_special_tokens=False)
        tokens = tokens[:room]
        windows += cut_into_windows(tokens, window, first_token(model))
        room = None if room is None else room - len(tokens)
        if room == 0:
            break
    with progress_bar(len(windows), title="Windows", shown=progress) as tick:
        scores = score_tokens(model, windows, policy, serving, tick)
    settings = {"path": str(path), "policy": policy.to_dict(), "window": window}
    return Perplexity.of(scores, settings)


def score_tokens(
    model: LanguageModel,
    windows: list[list[int]],
    policy: Policy,
    serving: Serving,
    on_done: Callable[[], None] | None = None,
) -> list[Score]:
    """Scores sequences through the cache; see `dms_jax.score`."""
    return score(
        model,
        windows,
        policy=policy,
        chunk=serving.chunk,
        page_size=serving.page_size,
        num_lanes=serving.lanes,
        memory=serving.memory,
        kv_dtype=serving.kv_dtype,
        on_done=on_done,
    )


def cut_into_windows(tokens: list[int], window: int, first: int) -> list[list[int]]:
    """Windows that predict every token once, each after the token before it.

    # tokens: [5, 6, 7]  window: 2  first: 1  Out: [[1, 5, 6], [6, 7]]
    """
    return [
        [tokens[start - 1] if start else first, *tokens[start : start + window]]
        for start in range(0, len(tokens), window)
    ]
