"""Prompts to token ids, with an error that names whatever cannot be used."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeGuard, runtime_checkable

import jax
import numpy as np

from dms_jax.checkpoint.messages import read_messages
from dms_jax.checks import check, is_whole, show
from dms_jax.config import ModelConfig
from dms_jax.errors import ConfigError, DataError, TooLongError
from dms_jax.generation.requests import OnTokens
from dms_jax.generation.sampling import Sampling
from dms_jax.model.language_model import LanguageModel, check_tokens

# A text with more characters than this for each token that fits is not even tokenized: most tokens
# have four, and a text of nothing but the longest ones is none that anybody writes.
CHARACTERS_A_TOKEN = 32
_ANSWER = "(the answer that stands here)"  # marks where a chat template puts an answer


@runtime_checkable
class Encoder(Protocol):
    """What turns prompts into token ids: a `LanguageModel`, or what is known of one elsewhere."""

    @property
    def tokenizer(self) -> Any:
        """Turns texts into token ids, with the chat template; None if there is none."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Says how many tokens there are, and how many positions."""
        ...


def check_call(sampling: Sampling | None, on_tokens: OnTokens | None) -> Sampling:
    """Returns the sampling to use; raises ConfigError if an argument is of another type."""
    sampling = Sampling() if sampling is None else check("sampling", sampling, Sampling)
    check("on_tokens", on_tokens, Annotated[OnTokens | None, "it is called with an Update"])
    return sampling


def check_stop(model: LanguageModel, sampling: Sampling) -> None:
    """Raises ConfigError if there are stop strings but no tokenizer."""
    if sampling.stop_strings and model.tokenizer is None:
        raise ConfigError(
            "Sampling: stop strings are looked for in text, and this model came without a "
            "tokenizer. Leave them out, or end at a token (generation.eos_token_ids)."
        )


def check_list(prompts: Any, what: str = "prompts") -> None:
    """Raises DataError unless `prompts` is a list that is not empty."""
    if isinstance(prompts, str):
        raise DataError(f"Give a list of {what}, not a single string: [{show(prompts)}].")
    if isinstance(prompts, Mapping) or not isinstance(prompts, Sequence | np.ndarray):
        raise DataError(f"Give a list of {what}, got {show(prompts)}.")
    if len(prompts) == 0:
        raise DataError(f"There is nothing to do: the list of {what} is empty.")
    if isinstance(prompts[0], Mapping):
        raise DataError(f"Give a list of {what}; one chat is a list of messages in that list.")
    if is_whole(prompts[0]):
        raise DataError(f"Give a list of {what}; one list of token ids goes into that list.")


def is_chat(prompt: Any) -> TypeGuard[Sequence[Mapping[str, Any]]]:
    """Whether a prompt is a list of chat messages."""
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def encode_prompt(
    model: Encoder,
    prompt: Any,
    *,
    name: str = "The prompt",
    continuing: bool = False,
    most: int | None = None,
) -> list[int]:
    """Returns the token ids of a prompt.

    Args:
      model: the model whose tokenizer, chat template, vocabulary and positions apply.
      prompt: a string, a list of chat messages, or token ids.
      name: what error messages call the prompt.
      continuing: whether a text continues a sequence, without a beginning-of-sequence token.
      most: the most tokens that are of use; None for the model's positions. Far longer texts are
        refused before they are tokenized (`check_characters`).

    Raises:
      TooLongError: the prompt is longer than the model's positions.
      DataError: the prompt is empty, of another type, outside the vocabulary, or text for a model
        without a tokenizer.
    """
    tokenizer = model.tokenizer
    most = model.config.max_position_embeddings if most is None else most
    if isinstance(prompt, str) or is_chat(prompt):
        if tokenizer is None:
            raise DataError(
                f"{name} is text, and this model came without a tokenizer. Give token ids."
            )
        if isinstance(prompt, str):
            if not prompt:
                raise DataError(
                    f"{name} is an empty string. Give at least one character, or, to start from "
                    "nothing, a list of the one token that begins a sequence."
                )
            text, special = prompt, not continuing
        else:
            _check_messages(prompt, name)
            check_messages_length(prompt, most, name)
            text = tokenizer.apply_chat_template(list(prompt), add_generation_prompt=True)
            special = False
        check_characters(len(text), most, name)
        try:
            tokens = tokenizer.encode(text, add_special_tokens=special)
        except DataError as error:
            raise DataError(f"{name}: {error}") from error
    else:
        tokens = _ids(prompt, name)
    if not tokens:
        raise DataError(f"{name} is empty. Give at least one token.")
    try:
        check_tokens(np.asarray(tokens, np.int64), model.config)
    except DataError as error:
        raise type(error)(f"{name}: {error}") from None
    return tokens


def check_characters(characters: int, most: int, name: str = "The prompt") -> None:
    """Raises TooLongError if a text has too many characters to be `most` tokens."""
    if characters > CHARACTERS_A_TOKEN * most:
        raise TooLongError(
            f"{name} has {characters:,} characters, too many for the {most:,} tokens of a sequence "
            f"here: {CHARACTERS_A_TOKEN * most:,} are the most that are looked at. Shorten it."
        )


def check_messages_length(messages: Sequence[Any], most: int, name: str = "The prompt") -> None:
    """Raises TooLongError if messages, which may have parts, hold too much text for a prompt."""
    contents = [message.get("content") for message in messages]
    parts = [part for each in contents for part in (each if isinstance(each, list) else [each])]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    check_characters(sum(len(text) for text in texts if isinstance(text, str)), most, name)


def encode_prompts(model: LanguageModel, prompts: Sequence[Any] | np.ndarray) -> list[list[int]]:
    """Returns the token ids of every prompt; see `encode_prompt`.

    A prompt that stands in the list several times, for as many chains, is encoded once.
    """
    encoded: dict[int, list[int]] = {}
    prompts = list(prompts)  # keeps the rows of an array, and so their ids
    for index, prompt in enumerate(prompts):
        if id(prompt) not in encoded:
            encoded[id(prompt)] = encode_prompt(model, prompt, name=f"Prompt {index}")
    return [encoded[id(prompt)] for prompt in prompts]


def text_after_answer(model: LanguageModel, past: Sequence[Any], messages: Sequence[Any]) -> str:
    """Returns the text that the chat template puts between the last answer and the next one.

    Args:
      model: the model whose chat template applies.
      past: messages of the earlier turns, without the last answer.
      messages: the new messages.

    Raises:
      DataError: a message is malformed, or the template refuses the conversation.
    """
    _check_messages(messages, "The prompt")
    text = model.tokenizer.apply_chat_template(
        [*past, {"role": "assistant", "content": _ANSWER}, *messages], add_generation_prompt=True
    )
    if text.count(_ANSWER) != 1:
        raise DataError(
            "The chat template does not repeat an earlier answer as it was, so a conversation "
            "cannot continue through it. Give the next turn as text."
        )
    return text.partition(_ANSWER)[2]


def _check_messages(messages: Sequence[Any], name: str) -> None:
    try:
        read_messages(messages)
    except DataError as error:
        raise DataError(f"{name}: {error}") from None


def _ids(prompt: Any, name: str) -> list[int]:
    if isinstance(prompt, np.ndarray | jax.Array):
        array = np.asarray(prompt)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"{name} must be a string, chat messages or a list of token ids, got an array of "
                f"{array.dtype} and shape {list(array.shape)}; token ids are whole numbers in one "
                "dimension."
            )
        return array.tolist()
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        raise DataError(
            f"{name} must be a string, chat messages or a list of token ids, got {show(prompt)}."
        )
    # Quickly for what nearly every prompt is: to look at 32,768 numbers in turn took 32 ms.
    if set(map(type, prompt)) == {int} and -(2**63) <= min(prompt) <= max(prompt) < 2**63:
        return list(prompt)
    for place, token in enumerate(prompt):
        if not is_whole(token):
            raise DataError(
                f"{name} holds {show(token)} at place {place}; token ids are whole numbers."
            )
        if not -(2**63) <= token < 2**63:
            raise DataError(f"{name} holds {show(token)} at place {place}, which is no token id.")
    return [int(token) for token in prompt]
