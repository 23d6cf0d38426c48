"""Every prompt decoded from the cache: one queue, whose answers are handed out as they end."""

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
    """Decodes requests to their ends.

    They share one queue: a lane that is free takes the next request. A policy that runs prompts
    token by token, which takes as long for one prompt as for many, starts them together instead:
    the next ones wait until every lane is free.

    Args:
      model: from `load` or `retrofit`.
      policy: to run.
      requests: in order; what they have been given before this call is not looked at.
      sampling: of all of them; seeds are the requests' own.
      serving: of the cache.
      on_answer: called with the index of each request that has ended and its completion.

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
    together = len(requests) if policy.parallel(prompt=True) else serving.lanes
    completions: list[Completion] = []
    engine.check_room(requests, sampling)
    for first in range(0, len(requests), together):
        completions += engine.serve(requests[first : first + together], sampling, on_tokens)
    return completions
