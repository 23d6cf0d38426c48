r"""Long texts in pieces: each is tokenized alone, and together they are the tokens of the whole.

A text is cut where white space ends, or where it begins, and where the tokenizer gives the same
tokens to what is around the cut whether it is cut or not:

    encode(left + right) = encode(left) + rest(right),   rest(x) = encode("\n" + x) - encode("\n")

The rest follows a line break, because some tokenizers put a space before a text. Where no cut will
do, a piece is longer: up to eight times, where it is cut inside a word. A run of a million letters
is no text that anybody wrote, and the tokens at such a cut may differ from those of the whole.

A text of any length takes the time and memory of its pieces, and only of those that are asked for.
"""

import re
from collections.abc import Iterator
from typing import Any

PIECE = 32_768  # characters
_AROUND = 48  # characters on either side of a cut that are compared
_TRIED = 16  # cuts of each kind
_LONGEST = 8  # times as long a piece may be
_LINE = re.compile(r"\n(?=\S)")
_WORD = re.compile(r"(?<=\S)(?=[ \n\t])")
_ANY = re.compile(r"(?=.)", re.DOTALL)


def piece(text: str, start: int, tokenizer: Any) -> tuple[list[int], int]:
    """Returns the tokens of the piece of a text that starts at a cut, and the cut that ends it.

    Args:
      text: the text.
      start: 0, or the end of another piece.
      tokenizer: the tokenizer; special tokens are not added.
    """
    end = _cut(text, start, tokenizer)
    if start == 0:
        return _encode(text[:end], tokenizer), end
    tokens = _rest(text[start:end], tokenizer)
    # None only behind a cut that no place was right for.
    return _encode(text[start:end], tokenizer) if tokens is None else tokens, end


def _cut(text: str, start: int, tokenizer: Any) -> int:
    """Returns the end of the piece that starts at `start`."""
    last, longest = start, start + _LONGEST * PIECE
    while last + PIECE + _AROUND < len(text):
        last += PIECE
        for place in _places(text, last - PIECE // 2, last, anywhere=last == longest):
            left, right = text[max(start, place - _AROUND) : place], text[place : place + _AROUND]
            rest = _rest(right, tokenizer)
            if rest is not None and _encode(left + right, tokenizer) == (
                _encode(left, tokenizer) + rest
            ):
                return place
        if last == longest:
            return last
    return len(text)


def _places(text: str, least: int, most: int, *, anywhere: bool) -> Iterator[int]:
    """Yields places to cut at, from the last one on: after line breaks, then before white space.

    Then come, if it may be `anywhere`, the others.
    """
    for pattern in (_LINE, _WORD, _ANY)[: 3 if anywhere else 2]:
        found = [match.end() for match in pattern.finditer(text, least, most)]
        yield from found[: -_TRIED - 1 : -1]


def _rest(text: str, tokenizer: Any) -> list[int] | None:
    """Returns the tokens of a text after a line break; None if it changes that of the break."""
    line = _encode("\n", tokenizer)
    tokens = _encode("\n" + text, tokenizer)
    return tokens[len(line) :] if tokens[: len(line)] == line else None


def _encode(text: str, tokenizer: Any) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
