"""The text that fills RULER's problems: words and an essay, ours or from files.

RULER takes words from the package wonderwords and downloads Paul Graham's essays; we cannot ship
either. Unless files are given, keys come from our adjectives and nouns, words to count from the
vocabulary of the shipped novels, and the essay from the part of the novels held out from training.
"""

import collections
import dataclasses
import functools
import pathlib
import re

from dms_jax import assets
from dms_jax.checks import show
from dms_jax.data.files import read_json, read_text
from dms_jax.data.tasks.words import ADJECTIVES, NOUNS
from dms_jax.errors import DataError

Path = str | pathlib.Path

LISTS = ("adjectivelist.txt", "nounlist.txt", "verblist.txt")  # files of wonderwords
_WORD = re.compile(r"(?<![\w'\u2019-])[a-z]{3,}(?![\w'\u2019-])")
_LEAST_KEYS = 40  # the same minimum as for words
_LEAST_USES = 2  # occurrences in the novels of a usable word
_SENTENCE_END = re.compile(
    r"(?:(?<=[.!?])|(?<=[.!?]['\"\u201d\u2019)\]]))(?<!\bMr\.)(?<!\bMrs\.)(?<!\bDr\.)(?<!\bSt\.) +"
    r"(?=[A-Z\"'\u201c\u2018(\[])"
)


@dataclasses.dataclass(frozen=True)
class Words:
    """Words for problems.

    Attributes:
      first, second: the parts of a key, "first-second".
      counted: different words for the counting tasks, in order.
    """

    first: tuple[str, ...]
    second: tuple[str, ...]
    counted: tuple[str, ...] = dataclasses.field(repr=False)


def read_words(path: Path | None) -> Words:
    """The words of a file (one per line), of a folder with wonderwords' lists, or ours.

    Raises:
      DataError: it cannot be read, or holds fewer than 40 words or keys.
    """
    if path is None:
        return Words(ADJECTIVES, NOUNS, _vocabulary())
    path = pathlib.Path(path)
    if path.is_dir():
        first, second, third = (_lines(path / name) for name in LISTS)
    else:
        first = second = _lines(path)
        third = ()
    counted = tuple(sorted({*first, *second, *third}))
    if len(counted) < 40:
        raise DataError(
            f"{path} holds {len(counted)} different words, and RULER needs 40 and many more for "
            "long contexts: one word a line."
        )
    keys = len(set(first)) * len(set(second))
    if keys < _LEAST_KEYS:
        raise DataError(
            f"{path} makes {keys} different keys of {LISTS[0]} and {LISTS[1]}, and RULER needs "
            f"{_LEAST_KEYS} and many more for long contexts: one word a line."
        )
    return Words(first, second, counted)


def read_essay(path: Path | None) -> tuple[str, ...]:
    """The words of an essay: a JSON file with "text" (RULER's form), plain text, or our novels.

    Raises:
      DataError: the file cannot be read or holds no text.
    """
    if path is None:
        return _novels()
    path = pathlib.Path(path)
    text = read_text(path)
    if path.suffix == ".json":
        data = read_json(text, f"{path}")
        text = data.get("text") if isinstance(data, dict) else None
        if not isinstance(text, str):
            raise DataError(f'{path} must hold {{"text": "..."}}, got {show(data)}.')
    if not text.strip():
        raise DataError(f"{path} holds no text.")
    return split_words(text)


def split_words(text: str) -> tuple[str, ...]:
    """Words as RULER splits them: white space at either end leaves an empty one."""
    return tuple(re.sub(r"\s+", " ", text).split(" "))


def sentences(text: str) -> list[str]:
    """Splits a text into sentences, without the spaces between them.

    RULER splits with NLTK's model of English; this uses a rule: a sentence ends in a full stop,
    question or exclamation mark, perhaps closed by a quotation mark or bracket, before a capital
    letter or an opening mark, but not after Mr., Mrs., Dr. or St.
    """
    return _SENTENCE_END.split(text)


@functools.cache
def _vocabulary() -> tuple[str, ...]:
    uses = collections.Counter[str]()
    for split in ("train", "validation", "test"):
        uses.update(_WORD.findall(" ".join(assets.books(split))))
    return tuple(sorted(word for word, count in uses.items() if count >= _LEAST_USES))


@functools.cache
def _novels() -> tuple[str, ...]:
    return split_words(" ".join(assets.books("test")))


def _lines(path: pathlib.Path) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, read_text(path).splitlines())))
