"""Turns records into documents: the fields of a JSON object or table row that make a document.

    {"messages": [...]}                               a conversation
    {"prompt": ..., "response": ...}                  a prompt with its response
    {"problem": ..., "generations": [...],            OpenR1: the problem with its last correct
     "correctness_math_verify": [...]}                generation; no document if there is none
    {"problem": ..., "solution": ...}                 the problem with its solution
    {"text": ...}                                     a text

Messages may be the JSON text of a list, as tables store them; `dms_jax/checkpoint/messages.py`
defines their content.

Alternatively, name a field, or give templates of the prompt and the response with several fields
("Solve: {problem}"). Records that are too long or malformed can be skipped.
"""

import abc
import array
import bisect
import dataclasses
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dms_jax.checkpoint.messages import messages_in, read_messages, text_of
from dms_jax.checks import Count, Options, Share, is_whole, show
from dms_jax.data.documents import Document, Exchange, Source
from dms_jax.errors import ConfigError, DataError

ACCEPTED = (
    "text, messages, prompt with response, problem with generations and correctness_math_verify "
    "(OpenR1), or problem with solution"
)
_VARIABLE = re.compile(r"\{(\w+)\}")


@dataclasses.dataclass(frozen=True)
class Fields(Options):
    """The fields of a record that make a document, and the records to skip.

    Attributes:
      field: the field with the text or the messages; None for the first of the above forms that
        fits a record.
      prompt, response: templates of a prompt and its response, with {name} for a field; both or
        none.
      malformed: largest share of records that may be skipped because they are malformed or unusable
        for the model (the chat template refuses the conversation, or tokens are outside the
        vocabulary). Above 0, all records are read at the start, and a warning counts the malformed
        ones. At 0, a malformed record is an error when it is read.
      longest: the most characters of a document; longer ones are skipped. None for no limit.
    """

    field: str | None = None
    prompt: str | None = None
    response: str | None = None
    malformed: Share = 0.0
    longest: Count | None = None

    def __post_init__(self):
        super().__post_init__()
        if (self.prompt is None) != (self.response is None):
            raise ConfigError("Fields: a template of the prompt needs one of the response.")
        if self.prompt is not None and self.field is not None:
            raise ConfigError("Fields: give a field or templates, not both.")

    def document(self, record: Any) -> Document | None:
        """Returns the document of a record; None if the record is skipped on purpose.

        Raises:
          DataError: the record is malformed.
        """
        if not isinstance(record, Mapping):
            raise DataError(f"expected a JSON object, got a {type(record).__name__}.")
        document = self._written(record)
        if document is None:
            return None
        if self.longest is not None and _characters(document) > self.longest:
            return None
        return document

    def _written(self, record: Mapping[str, Any]) -> Document | None:
        if self.prompt is not None and self.response is not None:
            return Exchange(_filled(self.prompt, record), _filled(self.response, record))
        if self.field is None and {"problem", "generations"} <= record.keys():
            return _open_r1(record)
        if self.field is None and "messages" not in record:
            for prompt, response in (("prompt", "response"), ("problem", "solution")):
                if {prompt, response} <= record.keys():
                    return _exchange(record, prompt, response)
        field = self.field or ("messages" if "messages" in record else "text")
        if field not in record:
            found = ", ".join(sorted(map(str, record))) or "none"
            wanted = "" if self.field else f" Accepted are {ACCEPTED}; name another by `field`."
            raise DataError(f"there is no field {field!r}; fields: {found}.{wanted}")
        value = _chat_or_text(record[field])
        if is_chat(value) or (isinstance(value, str) and field != "messages"):
            return value
        raise DataError(
            f"field {field!r} must be {'' if field == 'messages' else 'a text or '}a list of "
            f'messages ({{"role": ..., "content": ...}}), got {show(record[field])}.'
        )


class Records(Source):
    """A source of records, some of which may be skipped."""

    def __init__(self, fields: Fields | None):
        self._fields = fields = Fields() if fields is None else fields
        self.malformed = fields.malformed
        self._first: list[int] = []  # index of the first record of each file
        self._kept: array.array[int] | None = None

    def _file(self, place: int) -> int:
        """Returns the index of the file that holds a record."""
        return bisect.bisect_right(self._first, place) - 1

    @abc.abstractmethod
    def count(self) -> int:
        """Returns the number of records, including skipped ones."""

    @abc.abstractmethod
    def record(self, place: int) -> Any:
        """Returns a record."""

    @abc.abstractmethod
    def place(self, place: int) -> str:
        """Returns the origin of a record, for messages."""

    def read_all(self) -> None:
        """Reads all records if some may be skipped, and stores the indices of the documents."""
        fields = self._fields
        open_r1 = self.count() > 0 and self._is_open_r1()
        if not (fields.malformed > 0 or fields.longest or open_r1):
            if self.count():
                self._read(0)  # reports missing fields at once
            return
        kept, wrong, first = array.array("q"), 0, None
        for place in range(self.count()):
            try:
                if fields.document(self.record(place)) is not None:
                    kept.append(place)
            except DataError as error:
                if fields.malformed == 0:
                    raise self._located(place, error) from error
                # Finding the line of a record is slow, and only one is reported.
                wrong, first = wrong + 1, first or self._located(place, error)
        if wrong:
            told = f"{wrong} of {self.count()} lines are malformed"
            if wrong > fields.malformed * self.count():
                raise DataError(
                    f"{told}, more than a share of {fields.malformed:g}. The first: {first}"
                )
            warnings.warn(f"{told} and left out. The first: {first}", stacklevel=3)
            self.refused = wrong
        if out := self.count() - wrong - len(kept):
            warnings.warn(
                f"{out} of {self.count()} records are left out: too long, or without a correct "
                "generation.",
                stacklevel=3,
            )
        self._kept = kept

    def _is_open_r1(self) -> bool:
        try:
            record = self.record(0)
        except DataError:
            return False
        return isinstance(record, Mapping) and {"problem", "generations"} <= record.keys()

    def _read(self, place: int) -> Document | None:
        try:
            return self._fields.document(self.record(place))
        except DataError as error:
            raise self._located(place, error) from error

    def _located(self, place: int, error: DataError) -> DataError:
        return DataError(f"{self.place(place)}: {error}")

    def _place(self, index: int) -> int:
        return index if self._kept is None else self._kept[index]

    def __len__(self) -> int:
        return self.count() if self._kept is None else len(self._kept)

    def __getitem__(self, index: int) -> Document:
        document = self._read(self._place(index))
        if document is None:
            raise DataError(f"{self.where(index)}: none of its generations is correct.")
        return document

    def where(self, index: int) -> str:
        """Returns the origin of a document, for messages."""
        return self.place(self._place(index))


def is_chat(value: Any) -> bool:
    """Whether a value is a list of messages."""
    return (
        isinstance(value, list)
        and bool(value)
        and all(isinstance(turn, dict) and "role" in turn for turn in value)
    )


def _chat_or_text(value: Any) -> Any:
    """Normalises messages (or a JSON text of messages); returns other values unchanged.

    Raises:
      DataError: the content of a turn is not text.
    """
    messages = messages_in(value) if isinstance(value, str) else value
    return read_messages(messages) if is_chat(messages) else value


def _exchange(record: Mapping[str, Any], prompt: str, response: str) -> Exchange:
    first, second = _chat_or_text(record[prompt]), record[response]
    if not isinstance(first, str | list) or (isinstance(first, list) and not is_chat(first)):
        raise DataError(
            f"{prompt!r} must be a text or a list of messages, got {show(record[prompt])}."
        )
    try:
        return Exchange(first, text_of(second))
    except DataError as error:
        raise DataError(f"{response!r}: {error}") from None


def _open_r1(record: Mapping[str, Any]) -> Exchange | None:
    """The problem with the last correct generation, as in NVIDIA's recipe."""
    generations, right = record["generations"], record.get("correctness_math_verify")
    if not isinstance(generations, Sequence) or not isinstance(right, Sequence):
        raise DataError("'generations' and 'correctness_math_verify' must be lists.")
    if len(generations) != len(right):
        raise DataError(
            f"there are {len(generations)} generations and {len(right)} of correctness_math_verify."
        )
    correct = [text for text, is_right in zip(generations, right, strict=True) if is_right]
    if not correct:
        return None
    return _exchange(
        {"problem": record["problem"], "generation": correct[-1]}, "problem", "generation"
    )


def _filled(template: str, record: Mapping[str, Any]) -> str:
    def value(match: re.Match[str]) -> str:
        if match[1] not in record:
            found = ", ".join(sorted(map(str, record))) or "none"
            raise DataError(f"a template asks for {match[0]}, and the fields are: {found}.")
        given = record[match[1]]
        if is_whole(given) or (isinstance(given, float) and math.isfinite(given)):
            return str(given)
        if not isinstance(given, str):
            raise DataError(
                f"a template asks for {match[0]}, which must be a text or a number, got "
                f"{show(given)}."
            )
        return given

    return _VARIABLE.sub(value, template)


def _characters(document: Any) -> int:
    if isinstance(document, str):
        return len(document)
    if isinstance(document, Exchange):
        return _characters(document.prompt) + _characters(document.response)
    return sum(len(str(turn.get("content") or "")) for turn in document)
