r"""Long texts in pieces: each is tokenized alone, and together they are the tokens of the whole.

A text is cut where white space ends, or where it begins, and where the tokenizer gives the same
tokens to what is around the cut whether it is cut or not:

    encode(left + right) = encode(left) + rest(right),   rest(x) = encode("\n" + x) - encode("\n")

The rest follows a line break, because some tokenizers put a space before a text. Where no cut will
do, a piece is longer. A text of any length takes the time and memory of its pieces, and only of
those that are asked for.
"""

import re
from collections.abc import Iterator
from typing import Any

PIECE = 32_768  # characters
_AROUND = 48  # characters on either side of a cut that are compared
_TRIED = 16  # cuts of each kind
_LINE = re.compile(r"\n(?=\S)")
_WORD = re.compile(r"(?<=\S)(?=[ \n\t])")


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
    assert tokens is not None  # the cut was tried
    return tokens, end


def _cut(text: str, start: int, tokenizer: Any) -> int:
    """Returns the end of the piece that starts at `start`."""
    last = start
    while last + PIECE + _AROUND < len(text):
        last += PIECE
        for place in _places(text, last - PIECE // 2, last):
            left, right = text[max(start, place - _AROUND) : place], text[place : place + _AROUND]
            rest = _rest(right, tokenizer)
            if rest is not None and _encode(left + right, tokenizer) == (
                _encode(left, tokenizer) + rest
            ):
                return place
    return len(text)


def _places(text: str, least: int, most: int) -> Iterator[int]:
    """Yields places to cut at, from the last one on: after line breaks, then before white space."""
    for pattern in (_LINE, _WORD):
        found = [match.end() for match in pattern.finditer(text, least, most)]
        yield from found[: -_TRIED - 1 : -1]


def _rest(text: str, tokenizer: Any) -> list[int] | None:
    """Returns the tokens of a text after a line break; None if it changes that of the break."""
    line = _encode("\n", tokenizer)
    tokens = _encode("\n" + text, tokenizer)
    return tokens[len(line) :] if tokens[: len(line)] == line else None


def _encode(text: str, tokenizer: Any) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)
