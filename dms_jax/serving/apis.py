"""The POST endpoints, and the reader and formatter of each."""

import dataclasses
from collections.abc import Callable
from typing import Any

from dms_jax.serving import (
    chat_api,
    completions_api,
    messages_api,
    responses_api,
    tokens_api,
)
from dms_jax.serving.formatting import Formatter
from dms_jax.serving.refusals import RefusalError
from dms_jax.serving.requests import Asked, GenerationRequest, prepare
from dms_jax.serving.rpc import ServedModel


@dataclasses.dataclass(frozen=True)
class Api:
    """An endpoint.

    Attributes:
      read: parses a body; None if `answer` answers it without the model.
      formatter: formats the answers.
      answer: returns the answer to a body.
      error_body: returns the JSON of an error.
    """

    read: Callable[[bytes, ServedModel], Asked] | None = None
    formatter: Callable[[GenerationRequest, ServedModel], Formatter] | None = None
    answer: Callable[[bytes, ServedModel], dict[str, Any]] | None = None
    error_body: Callable[[RefusalError], dict[str, Any]] = RefusalError.openai_body


APIS: dict[str, Api] = {
    "/v1/chat/completions": Api(chat_api.read, chat_api.ChatFormatter),
    "/v1/completions": Api(completions_api.read, completions_api.CompletionFormatter),
    "/v1/responses": Api(responses_api.read, responses_api.ResponseFormatter),
    "/v1/messages": Api(
        messages_api.read, messages_api.MessageFormatter, error_body=messages_api.error_body
    ),
    "/v1/messages/count_tokens": Api(
        answer=tokens_api.count_message_tokens, error_body=messages_api.error_body
    ),
    "/tokenize": Api(answer=tokens_api.tokenize),
    "/detokenize": Api(answer=tokens_api.detokenize),
}


def parse_body(
    data: bytes, path: str, served: ServedModel, seed: int
) -> GenerationRequest | dict[str, Any]:
    """Parses the body of an endpoint, or answers one that needs no model.

    Raises:
      DmsJaxError: see `requests.prepare`.
    """
    api = APIS[path]
    if api.answer is not None:
        return api.answer(data, served)
    assert api.read is not None
    return prepare(api.read(data, served), served, seed)
