"""Streams answers: the text unchanged, and on a terminal the model's thoughts, dimmed."""

from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from dms_jax.generation.answer_readers import AnswerForm, Text
from dms_jax.generation.answers import make_reader

_PLAIN, _DIM = Style(), Style(dim=True)


def stream_text(console: Console, text: str, style: Style = _PLAIN) -> None:
    """Writes a piece of text as it is: rich's Text expands tabs and drops carriage returns."""
    console.print(Segments([Segment(text, style)]), end="", soft_wrap=True)


class AnswerWriter:
    """Streams an answer; on a terminal also the model's thoughts, dimmed, on separate lines.

    Args:
      console: where to write.
      form: how thoughts are marked.
    """

    def __init__(self, console: Console, form: AnswerForm):
        self._console, self._reader = console, make_reader(form)
        self._thought: bool | None = None  # whether the last piece was one

    def write(self, text: str, *, last: bool = False) -> None:
        """Writes a piece; the last one ends the line."""
        pieces = self._reader.read(text)
        if last:
            pieces += self._reader.end()
        for piece in pieces:
            assert isinstance(piece, Text)  # no tools are offered
            if piece.thought and not self._console.is_terminal:
                continue
            text = piece.text
            if self._thought not in (None, piece.thought):
                text = "\n" + text.removeprefix("\n")
            self._thought = piece.thought
            stream_text(self._console, text, _DIM if piece.thought else _PLAIN)
        if last:
            stream_text(self._console, "\n")
