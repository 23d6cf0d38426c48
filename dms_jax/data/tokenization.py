"""Tokenization of documents.

A text starts with the tokenizer's begin token or, if there is none, ends with its end token. A
conversation goes through the tokenizer's chat template, which contains the special tokens. A prompt
with its response is a conversation if the tokenizer has a chat template, otherwise the two texts
between the begin and the end token. Arrays of token ids are used unchanged.

**Answers.** If only answers count, each part of a document is tokenized separately, as in
generation: the template up to an answer is its prompt.

    # <user>Hi<end><assistant>Hello<end>    parts "<user>Hi<end><assistant>", "Hello<end>"

**Documents that cannot be encoded.** A chat template may refuse a well-formed conversation, and a
token may be outside the vocabulary. If a share of the documents may be malformed
(`Source.malformed`), such a document counts as empty.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from dms_jax.checkpoint.messages import read_messages
from dms_jax.data.documents import Exchange, Source
from dms_jax.errors import DataError

Part = tuple[str | np.ndarray, bool]  # a text or token ids; whether it belongs to an answer
Tokenized = dict[str, np.ndarray]


class TokenizedDocuments:
    """The documents of a source as token ids: the random-access data source of Grain.

    {"tokens": int32 [n], "loss_mask": bool [n]}
    """

    def __init__(
        self, source: Source, tokenizer: Any, vocab_size: int | None, *, answers_only: bool = False
    ):
        self._source, self._tokenizer, self._vocab_size = source, tokenizer, vocab_size
        self._answers_only = answers_only
        self._left_out: set[int] = set()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Tokenized:
        try:
            if self._answers_only:
                tokens, counts = encode_answers(self._source[index], self._tokenizer)
            else:
                tokens = encode_document(self._source[index], self._tokenizer)
                counts = np.ones(tokens.shape, bool)
            check_vocabulary(tokens, self._vocab_size)
        except DataError as error:
            self._leave_out(index, error)
            tokens, counts = np.zeros(0, np.int32), np.zeros(0, bool)
        return {"tokens": tokens, "loss_mask": counts}

    def _leave_out(self, index: int, error: DataError) -> None:
        """Counts a document that cannot be encoded, and warns of the first.

        Raises:
          DataError: there are more than `Source.malformed` allows.
        """
        source = self._source
        self._left_out.add(index)
        wrong, total = len(self._left_out) + source.refused, len(source) + source.refused
        if wrong > source.malformed * total:
            told = f"{source.where(index)}: {error}"
            if source.malformed:
                told = (
                    f"{wrong} of {total} documents are malformed or cannot be encoded, more than a "
                    f"share of {source.malformed:g}. The last: {told}"
                )
            raise DataError(told) from error
        if len(self._left_out) == 1:
            warnings.warn(
                f"A document cannot be encoded; it is left out, and so are others. "
                f"{source.where(index)}: {error}",
                stacklevel=2,
            )


def encode_document(document: Any, tokenizer: Any) -> np.ndarray:
    """Returns the token ids of one document, int32 [n].

    Raises:
      DataError: there is no tokenizer for a text or no chat template for a conversation, or the
        document is something else and no array of token ids.
    """
    return _encode_parts(_parts(document, tokenizer, answers=False), tokenizer)[0]


def encode_answers(
    document: Any, tokenizer: Any
) -> tuple[Int[np.ndarray, " n"], Bool[np.ndarray, " n"]]:
    """Returns the token ids of a document, and whether each belongs to an answer.

    Raises:
      DataError: see `encode_document`; or the document has no answer, or its template renders
        earlier turns differently when later turns follow.
    """
    return _encode_parts(_parts(document, tokenizer, answers=True), tokenizer)


def check_vocabulary(tokens: np.ndarray, vocab_size: int | None) -> None:
    """Raises DataError if a token id lies outside the vocabulary."""
    if vocab_size is None or not tokens.size:
        return
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        raise DataError(f"token ids must lie in 0 ... {vocab_size - 1}, got {low} ... {high}.")


def _encode_parts(parts: list[Part], tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the token ids of parts, and whether each belongs to an answer."""
    ids = [
        _token_ids(tokenizer.encode(part, add_special_tokens=False))
        if isinstance(part, str)
        else part
        for part, _ in parts
    ]
    answers = [
        np.full(each.shape, is_answer) for each, (_, is_answer) in zip(ids, parts, strict=True)
    ]
    return np.concatenate(ids), np.concatenate(answers)


def _parts(document: Any, tokenizer: Any, *, answers: bool) -> list[Part]:
    """Returns the parts of a document; without `answers` a conversation is one part."""
    if isinstance(document, Exchange):
        return _exchange(document, tokenizer)
    if _is_chat(document):
        if answers:
            return _turns([*document], tokenizer)
        return [(_template(document, tokenizer, add_generation_prompt=False), False)]
    if answers:
        raise DataError(
            "this document has no answers that could be told apart. Give conversations, or prompts "
            "with responses."
        )
    if isinstance(document, str):
        begin, end = map(_token_ids, _special(tokenizer))
        return [(begin, False), (document, False), (end, False)]
    return [(_token_ids(document), False)]


def _exchange(document: Exchange, tokenizer: Any) -> list[Part]:
    prompt, response = document.prompt, document.response
    if (isinstance(prompt, str) or _is_chat(prompt)) != isinstance(response, str):
        raise DataError(
            "token ids go with token ids: of a prompt and its response both must be token ids, "
            "or the prompt a text or a list of messages and the response a text."
        )
    if not isinstance(response, str):
        return [(_token_ids(prompt), False), (_token_ids(response), True)]
    if isinstance(prompt, str) and getattr(tokenizer, "chat_template", None) is None:
        begin, _ = _special(tokenizer)
        end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        return [
            (_token_ids(begin), False),
            (prompt, False),
            (response, True),
            (_token_ids(end), True),
        ]
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
    turns.append({"role": "assistant", "content": response})
    return _turns(turns, tokenizer, first=len(turns) - 1)


def _turns(messages: list[Any], tokenizer: Any, first: int = 0) -> list[Part]:
    """Returns the parts of a conversation; answers are the assistant's turns from `first` on."""
    whole = _template(messages, tokenizer, add_generation_prompt=False)
    parts: list[Part] = []
    done = 0
    for place, message in enumerate(messages):
        if place < first or message.get("role") != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:place], add_generation_prompt=True)
        after = tokenizer.apply_chat_template(messages[: place + 1], add_generation_prompt=False)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
            raise DataError(
                f"the chat template writes turn {place} in another way once it is answered or "
                "others follow, so answers cannot be told apart. Give single exchanges, or "
                "let every token count."
            )
        end = len(before) + len(after[len(before) :].rstrip())
        parts += [(whole[done : len(before)], False), (whole[len(before) : end], True)]
        done = end
    if not parts:
        raise DataError("this conversation has no turn of the assistant.")
    return [*parts, (whole[done:], False)]


def _is_chat(document: Any) -> bool:
    """Whether a document is a list of messages, or begins like one."""
    return isinstance(document, Sequence) and bool(document) and isinstance(document[0], dict)


def _template(messages: Sequence[Any], tokenizer: Any, **options: Any) -> str:
    """Returns the text of a conversation."""
    if tokenizer is None:
        raise DataError("the model has no tokenizer. Give token ids instead of conversations.")
    return tokenizer.apply_chat_template(read_messages(messages), **options)


def _special(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Returns the special tokens before a text, and those after it."""
    if tokenizer is None:
        raise DataError("the model has no tokenizer. Give token ids instead of texts.")
    if tokenizer.bos_token_id is not None:
        return [tokenizer.bos_token_id], []
    return [], [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]


def _token_ids(document: Any) -> np.ndarray:
    """Returns token ids as an array, int32 [n].

    Raises:
      DataError: the document is not a list of token ids.
    """
    tokens = np.asarray(document)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise DataError(
            f"expected a text, a list of messages or a list of token ids, got "
            f"{type(document).__name__} of shape {tokens.shape} and type {tokens.dtype}."
        )
    return tokens.astype(np.int32)
