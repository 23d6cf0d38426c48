"""Decodes all prompts of an evaluation from one queue, and reports each answer as it ends."""

from collections.abc import Callable

from dms_jax.evaluation.serving import Serving
from dms_jax.generation import Completion, Sampling, Update
from dms_jax.generation.requests import Request, completion_of
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy

OnAnswer = Callable[[int, Completion], None]


def answer(
    model: LanguageModel,
    policy: Policy,
    requests: list[Request],
    sampling: Sampling,
    serving: Serving,
    on_answer: OnAnswer | None = None,
) -> list[Completion]:
    """Runs requests to completion.

    They share one queue: a free lane takes the next request. Policies that run prompts token by
    token take as long for one prompt as for many, so they start a full set of lanes together, and
    the next set waits until every lane is free.

    Args:
      model: from `load` or `retrofit`.
      policy: the cache policy.
      requests: fresh requests, in the order in which they start.
      sampling: how all of them are sampled; the seeds are in the requests.
      serving: options of the cache.
      on_answer: called with the index and the completion of each request that has ended.

    Raises:
      CapacityError: the memory does not hold a single sequence.
    """
    if not requests:
        return []
    longest = max(len(request.prompt) + request.max_new_tokens for request in requests)
    engine = serving.engine(model, policy, sequences=len(requests), max_tokens=longest)
    by_index = {request.index: request for request in requests}

    def hand_out(update: Update) -> None:
        if update.finished and on_answer is not None:
            request = by_index[update.index]
            on_answer(update.index, completion_of(request, logprobs=sampling.logprobs))

    on_tokens = None if on_answer is None else hand_out
    together = len(requests) if policy.parallel != "never" else serving.lanes
    completions: list[Completion] = []
    engine.check_room(requests, sampling)
    for first in range(0, len(requests), together):
        completions += engine.serve(requests[first : first + together], sampling, on_tokens)
    return completions
