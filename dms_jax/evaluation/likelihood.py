"""Log-probabilities of continuations given contexts, from the real paged cache.

The context is prefilled as a prompt, including evictions at its end; the continuation is
teacher-forced, one decode step per token. So the policy behaves as if the model had generated the
continuation. A context that continuations share is prefilled once.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from dms_jax.errors import DataError
from dms_jax.evaluation.serving import Serving
from dms_jax.generation.engine import Source
from dms_jax.generation.requests import Request, scored_request
from dms_jax.interrupts import keep_finished
from dms_jax.model.language_model import LanguageModel, check_tokens
from dms_jax.policies import Policy

Tokens = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Likelihood:
    """The likelihood of a continuation.

    Attributes:
      logprob: log-probability of the whole continuation given its context, in nats.
      greedy: whether greedy decoding would generate it.
      peak_tokens: the most live entries after any token, averaged over layers and KV heads.
    """

    logprob: float
    greedy: bool
    peak_tokens: float


def encode_pair(model: LanguageModel, context: str, continuation: str) -> tuple[Tokens, Tokens]:
    """Token ids of a context and of its continuation.

    Both are encoded together, because a tokenizer may merge across the boundary, and split after
    the number of tokens of the context alone. Trailing spaces of the context move to the
    continuation, where most tokenizers put them. An empty context becomes the beginning-of-sequence
    token.

    Raises:
      DataError: there is no tokenizer, or the continuation has no token.
    """
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise DataError("Likelihood of text needs a tokenizer, and this model has none.")
    bare = context.rstrip()
    if bare:
        continuation, context = context[len(bare) :] + continuation, bare
        before = encode_text(model, context)
        both = encode_text(model, context + continuation)
        after = both[len(before) :] or tokenizer.encode(continuation, add_special_tokens=False)
        before = both[: len(before)]
    else:
        before = [first_token(model)]
        after = tokenizer.encode(context + continuation, add_special_tokens=False)
        after = after[1:] if after[:1] == before and len(after) > 1 else after
    if not after:
        raise DataError(f"The continuation {continuation!r} has no token of its own.")
    return tuple(before), tuple(after)


def encode_text(model: LanguageModel, text: str) -> list[int]:
    """Token ids of a text; a leading beginning-of-sequence token, as in chats, is not repeated."""
    begin = model.tokenizer.special_tokens.get("bos_token")
    begins = begin is not None and text.startswith(begin)
    return model.tokenizer.encode(text, add_special_tokens=not begins)


def first_token(model: LanguageModel) -> int:
    """The beginning-of-sequence token, or an end-of-sequence token if there is none.

    Raises:
      DataError: the checkpoint declares neither.
    """
    ends = model.generation.eos_token_ids
    for token in (
        getattr(model.tokenizer, "bos_token_id", None),
        model.generation.bos_token_id,
        getattr(model.tokenizer, "eos_token_id", None),
        ends[0] if ends else None,
    ):
        if token is not None:
            return int(token)
    raise DataError("This checkpoint declares no token that begins or ends a sequence.")


def likelihoods(
    model: LanguageModel,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    policy: Policy | str | None = None,
    serving: Serving | None = None,
    on_done: Callable[[], None] | None = None,
) -> list[Likelihood]:
    """Computes the log-probabilities of continuations given their contexts.

    Args:
      model: from `load` or `retrofit`.
      pairs: token ids of a context and of a continuation, at least one each.
      policy: the cache policy; the checkpoint's if None. A compression_ratio is relative to the
        length of each pair.
      serving: options of the cache; `Serving()` if None.
      on_done: called whenever a pair is done.

    Raises:
      DataError: a part is empty or outside the vocabulary, or both exceed the model's positions.
      CapacityError: the memory does not hold a single sequence.

    An exception that interrupts it, KeyboardInterrupt too, carries the finished part:
    `error.finished` is {index of the pair: Likelihood}.
    """
    policy, serving = model.resolve_policy(policy), Serving.given("likelihoods", serving)
    requests: list[Request] = []
    for index, (context, continuation) in enumerate(pairs):
        if not len(context) or not len(continuation):
            raise DataError(f"Pair {index} has an empty context or an empty continuation.")
        both = np.asarray([*context, *continuation], np.int64)
        try:
            check_tokens(both, model.config)
        except DataError as error:
            raise DataError(f"Pair {index}: {error}") from None
        given = list(context), list(continuation)
        requests.append(scored_request(model.config, index, *given, max_length=len(both)))
    if not requests:
        return []
    # Pairs with one context follow each other, so that it is prefilled once. The longest come
    # first, so that a lack of memory shows at once.
    longest_of: dict[Tokens, int] = {}
    for each in requests:
        context = tuple(each.prompt)
        longest_of[context] = max(longest_of.get(context, 0), each.max_length)
    ordered = sorted(
        requests,
        key=lambda each: (-longest_of[tuple(each.prompt)], each.prompt, -each.max_length),
    )
    longest = ordered[0].max_length
    engine = serving.engine(model, policy, sequences=len(requests), max_tokens=longest)

    def finished() -> dict[int, Likelihood]:
        return {each.index: _likelihood_of(each) for each in requests if each.usage is not None}

    with keep_finished(finished):
        engine.serve(Source(ordered, on_end=on_done and (lambda _: on_done())))
    return list(map(_likelihood_of, requests))


def _likelihood_of(request: Request) -> Likelihood:
    assert request.usage is not None
    logprob = float(np.sum(request.logprobs, dtype=np.float64))
    return Likelihood(logprob, request.greedy, request.usage.peak_tokens)
