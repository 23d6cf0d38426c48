"""Documents to token ids, and which of them belong to answers.

A text starts with the tokenizer's begin token or, if there is none, ends with its end token. A
conversation goes through the tokenizer's chat template, which contains the special tokens. A prompt
with its response is a conversation if the tokenizer has a chat template, and otherwise the two
texts between the begin and the end token. Arrays of token ids are used as they are.

Where answers are told apart, each piece is tokenized by itself, as it is when the model answers:
the template up to the place of an answer is the prompt there.

    # <user>Hi<end><assistant>Hello<end>    pieces "<user>Hi<end><assistant>", "Hello<end>"
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from dms_jax.checkpoint.messages import read_messages
from dms_jax.data.documents import Exchange
from dms_jax.data.pieces import piece
from dms_jax.errors import DataError

Pieces = list[tuple[np.ndarray, bool]]  # token ids, and whether they are of an answer


def encode_document(document: Any, tokenizer: Any) -> np.ndarray:
    """Returns the token ids of one document, int32 [n].

    Raises:
      DataError: a text has no tokenizer, a conversation no chat template, or the document is
        neither of these nor an array of token ids.
    """
    if isinstance(document, str):
        parts, start = [], 0
        while start >= 0:
            tokens, start = encode_piece(document, start, tokenizer)
            parts.append(tokens)
        return np.concatenate(parts)
    if _is_chat(document):
        text = _template(document, tokenizer, add_generation_prompt=False)
        return np.asarray(_encode(text, tokenizer), np.int32)
    if isinstance(document, Exchange):
        return np.concatenate([tokens for tokens, _ in _pieces(document, tokenizer)])
    tokens = np.asarray(document)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise DataError(
            f"expected a text, a list of messages or a list of token ids, got "
            f"{type(document).__name__} of shape {tokens.shape} and type {tokens.dtype}."
        )
    return tokens.astype(np.int32)


def encode_piece(text: str, start: int, tokenizer: Any) -> tuple[np.ndarray, int]:
    """Returns the token ids of a piece of a text, and where the next starts; -1 if it is the last.

    Args:
      text: the text, of any length (`dms_jax.data.pieces`).
      start: 0, or where a piece before ended.
      tokenizer: the tokenizer.

    Raises:
      DataError: there is no tokenizer.
    """
    if tokenizer is None:
        raise DataError("the model has no tokenizer. Give token ids instead of texts.")
    ids, end = piece(text, start, tokenizer)
    if start == 0 and tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id, *ids]
    last = end == len(text)
    if last and tokenizer.bos_token_id is None and tokenizer.eos_token_id is not None:
        ids = [*ids, tokenizer.eos_token_id]
    return np.asarray(ids, np.int32), -1 if last else end


def encode_answers(
    document: Any, tokenizer: Any
) -> tuple[Int[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Returns the token ids of a document, and whether each belongs to an answer.

    Raises:
      DataError: see `encode_document`; or the document has no answer, or its template writes
        earlier turns in another way once there are later ones.
    """
    pieces = _pieces(document, tokenizer)
    counts = [np.full(tokens.shape, is_answer) for tokens, is_answer in pieces]
    return np.concatenate([tokens for tokens, _ in pieces]), np.concatenate(counts)


def check_document(document: Any, tokenizer: Any, *, answers: bool) -> np.ndarray | None:
    """Raises what `encode_document`, or `encode_answers`, would, and tokenizes no text.

    Returns:
      The token ids of a document that is given as such; None of texts.

    Raises:
      DataError: see there.
    """
    if isinstance(document, str) and not answers:
        return None
    if answers or isinstance(document, Exchange):
        parts = [part for part, _ in _parts(document, tokenizer)]
        return None if isinstance(parts[0], str) else np.concatenate(parts)
    if _is_chat(document):
        _template(document, tokenizer, add_generation_prompt=False)
        return None
    return encode_document(document, tokenizer)


def _pieces(document: Any, tokenizer: Any) -> Pieces:
    """The token ids of a document's parts, and whether each is of an answer."""
    parts = _parts(document, tokenizer)
    if _is_plain(document, tokenizer):
        return _plain(document.prompt, document.response, tokenizer)
    return [
        (_ids(_encode(part, tokenizer) if isinstance(part, str) else part), is_answer)
        for part, is_answer in parts
    ]


def _parts(document: Any, tokenizer: Any) -> list[tuple[Any, bool]]:
    """A document's parts, texts or token ids, and whether each is of an answer."""
    if isinstance(document, Exchange):
        prompt, response = document.prompt, document.response
        if (isinstance(prompt, str) or _is_chat(prompt)) != isinstance(response, str):
            raise DataError(
                "token ids go with token ids: of a prompt and its response both must be token ids, "
                "or the prompt a text or a list of messages and the response a text."
            )
        if not isinstance(response, str):
            return [(_ids(prompt), False), (_ids(response), True)]
        if _is_plain(document, tokenizer):
            return [(prompt, False), (response, True)]
        turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        turns.append({"role": "assistant", "content": response})
        return _chat(turns, tokenizer, first=len(turns) - 1)
    if _is_chat(document):
        return _chat([*document], tokenizer)
    raise DataError(
        "this document has no answers that could be told apart. Give conversations, or prompts "
        "with responses."
    )


def _is_plain(document: Any, tokenizer: Any) -> bool:
    """Whether a document is a prompt and a response for a tokenizer without a chat template."""
    if not isinstance(document, Exchange) or not isinstance(document.prompt, str):
        return False
    return getattr(tokenizer, "chat_template", None) is None


def _is_chat(document: Any) -> bool:
    """Whether a document is a list of messages, or begins as one."""
    return isinstance(document, Sequence) and bool(document) and isinstance(document[0], dict)


def _template(messages: Sequence[Any], tokenizer: Any, **options: Any) -> str:
    """Returns the text of a conversation."""
    if tokenizer is None:
        raise DataError("the model has no tokenizer. Give token ids instead of conversations.")
    return tokenizer.apply_chat_template(read_messages(messages), **options)


def _plain(prompt: str, response: str, tokenizer: Any) -> Pieces:
    first = encode_document(prompt, tokenizer)
    if tokenizer.bos_token_id is None and tokenizer.eos_token_id is not None:
        first = first[:-1]  # the end token comes after the response
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return [(first, False), (_ids([*_encode(response, tokenizer), *end]), True)]


def _chat(messages: list[Any], tokenizer: Any, first: int = 0) -> list[tuple[Any, bool]]:
    """The texts of a conversation, whose answers are the assistant's turns from `first` on."""
    whole = _template(messages, tokenizer, add_generation_prompt=False)
    pieces: list[tuple[str, bool]] = []
    done = 0
    for place, message in enumerate(messages):
        if place < first or message.get("role") != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[: place + 1], add_generation_prompt=False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
            raise DataError(
                f"the chat template writes turn {place} in another way once it is answered or "
                "others follow, so that answers cannot be told apart. Give single exchanges, or "
                "let every token count."
            )
        end = len(before) + len(after[len(before) :].rstrip())
        pieces += [(whole[done : len(before)], False), (whole[len(before) : end], True)]
        done = end
    if not pieces:
        raise DataError("this conversation has no turn of the assistant.")
    return [*pieces, (whole[done:], False)]


def _encode(text: str, tokenizer: Any) -> list[int]:
    """Returns the token ids of a text as it is, in the time and memory of its pieces."""
    ids, start = [], 0
    while start < len(text):
        part, start = piece(text, start, tokenizer)
        ids += part
    return ids


def _ids(tokens: Any) -> np.ndarray:
    return encode_document(np.asarray(tokens), None)
