"""vLLM's /tokenize and /detokenize, and Anthropic's /v1/messages/count_tokens."""

from typing import Any

from dms_jax.generation.requests import encode_prompt
from dms_jax.serving import chat_api, messages_api
from dms_jax.serving.fields import Table
from dms_jax.serving.refusals import RefusalError, naming
from dms_jax.serving.requests import encode
from dms_jax.serving.rpc import ServedModel

_CHAT = {
    "messages": Any,
    "tools": Any,
    "tool_choice": Any,
    "reasoning_effort": str,
    "chat_template_kwargs": Any,
    "add_generation_prompt": bool,
}
_TOKENIZE = Table(
    {"model": str, "prompt": str, "add_special_tokens": bool, "return_token_strs": bool} | _CHAT,
    {"continue_final_message": (False,), "chat_template": ()},
)
_DETOKENIZE = Table({"model": str, "tokens": list}, {})


def tokenize(body: bytes, served: ServedModel) -> dict[str, Any]:
    """Returns the answer to a body for /tokenize; raises RefusalError."""
    given, _ = _TOKENIZE.read(body, served.models)
    if ("prompt" in given) == ("messages" in given):
        raise RefusalError("Send either prompt, a text, or messages.", param="prompt")
    _check_tokenizer(served)
    if "messages" in given:
        begins = given.get("add_generation_prompt", True)
        chat = chat_api.read_chat(given, begins_answer=begins)
        ((tokens,), _) = encode(chat, served, "messages")
    else:
        with naming("prompt"):
            special = given.get("add_special_tokens", True)
            tokens = encode_prompt(served, given["prompt"], continuing=not special)
    texts = None
    if given.get("return_token_strs", False):
        texts = [served.tokenizer.decode([each], skip_special_tokens=False) for each in tokens]
    return {
        "count": len(tokens),
        "max_model_len": served.max_tokens,
        "tokens": tokens,
        "token_strs": texts,
    }


def detokenize(body: bytes, served: ServedModel) -> dict[str, Any]:
    """Returns the answer to a body for /detokenize; raises RefusalError."""
    given, _ = _DETOKENIZE.read(body, served.models)
    if "tokens" not in given:
        raise RefusalError("tokens is missing.", param="tokens")
    _check_tokenizer(served)
    with naming("tokens"):
        tokens = encode_prompt(served, given["tokens"], name="tokens")
        return {"prompt": served.tokenizer.decode(tokens, skip_special_tokens=False)}


def count_message_tokens(body: bytes, served: ServedModel) -> dict[str, Any]:
    """Returns the answer to a body for /v1/messages/count_tokens; raises RefusalError."""
    asked = messages_api.read_to_count(body, served)
    ((tokens,), _) = encode(asked.prompts, served, "messages")
    return {"input_tokens": len(tokens)}


def _check_tokenizer(served: ServedModel) -> None:
    if served.tokenizer is None:
        raise RefusalError("The model has no tokenizer.")
