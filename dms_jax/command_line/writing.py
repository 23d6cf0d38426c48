"""Streams text: wrapped between words on a terminal, unchanged elsewhere."""

import re

from rich.cells import cell_len
from rich.console import Console
from rich.segment import Segment, Segments

from dms_jax.generation.answers import AnswerForm, AnswerReader
from dms_jax.generation.call_readers import Text

# The most characters to hold back of text without spaces, such as Chinese.
_LONGEST_WORD = 30
_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class Writer:
    """Writes the pieces of a text as they arrive.

    Holds back a word until its end is known, so that a line can break before it.

    Args:
      console: where to write.
      width: columns of a line; by default the terminal's, and unlimited elsewhere.
      style: rich style on a terminal.
      column: column in which the text begins.
    """

    def __init__(
        self, console: Console, width: int | None = None, style: str = "", column: int = 0
    ):
        self._console, self._style = console, style
        self._width = width or (console.width if console.is_terminal else None)
        self._held, self._spaces, self._column = "", "", column

    def write(self, text: str, *, last: bool = False) -> None:
        """Writes a piece; the last one flushes the held word and ends the line."""
        if self._width is None:
            # As a Segment: rich's Text expands tabs and drops carriage returns.
            self._console.print(Segments([Segment(text + "\n" * last)]), end="", soft_wrap=True)
            return
        text = self._held + text
        word = re.search(r"\S*$", text)
        whole = len(text) if last or word is None else word.start()
        if len(text) - whole > _LONGEST_WORD:
            whole = len(text)
        self._held = text[whole:]
        for part in _PARTS.findall(text[:whole]):
            self._write(part, self._width)
        if last:
            self._out("\n")
            self._spaces, self._column = "", 0

    def pause(self) -> int:
        """Writes the held text; returns the column at which another text can continue."""
        if self._width is not None:
            self._write(self._held, self._width)
            self._out(self._spaces)
            self._column += cell_len(self._spaces)
            self._held, self._spaces = "", ""
        return self._column

    def _write(self, part: str, width: int) -> None:
        """Writes a word, or keeps the spaces for the next one."""
        if part == "\n":
            self._out(part)
            self._spaces, self._column = "", 0
        elif part.isspace():
            self._spaces += part
        else:
            if self._column + cell_len(self._spaces + part) > width and self._column:
                self._out("\n")
                self._spaces, self._column = "", 0
            self._out(self._spaces + part)
            self._column += cell_len(self._spaces + part)
            if self._column > width:  # a word longer than a line, which the terminal breaks
                self._column %= width
            self._spaces = ""

    def _out(self, text: str) -> None:
        self._console.print(
            text,
            end="",
            style=self._style,
            markup=False,
            emoji=False,
            highlight=False,
            soft_wrap=True,
        )


class AnswerWriter:
    """Streams an answer; on a terminal also the model's thoughts, dimmed, on separate lines.

    Args:
      console: where to write.
      form: how thoughts are marked.
      column: column in which the answer begins.
    """

    def __init__(self, console: Console, form: AnswerForm, column: int = 0):
        self._reader, self._says = AnswerReader(form), Writer(console, column=column)
        self._thinks = Writer(console, style="dim") if console.is_terminal else None
        self._last: Writer | None = None  # the writer of the last piece

    def write(self, text: str, *, last: bool = False) -> None:
        """Writes a piece; the last one ends the line."""
        pieces = self._reader.read(text)
        if last:
            pieces += self._reader.end()
        for piece in pieces:
            assert isinstance(piece, Text)  # no tools are offered
            writer = self._thinks if piece.thought else self._says
            if writer is not None:
                self._write(writer, piece.text)
        if last:
            (self._last or self._says).write("", last=True)

    def _write(self, writer: Writer, text: str) -> None:
        if self._last is not None and self._last is not writer:
            self._last.write("", last=True)
            text = text.removeprefix("\n")  # the line has ended
        self._last = writer
        writer.write(text)
