"""The errors of this library: every one derives from `DmsJaxError`.

A message says what was wrong, where, and what to do about it. An argument of the caller is in
backquotes, so that a command can name its option instead (`command_line.spelling`). A message
often quotes untrusted text (names of tensors, the output of a template), so it is always short and
printable.

Any exception that ends a running `generate`, `score` or `evaluate` (one of these errors, an
interrupt, a callback's error) has the finished results as its attribute `finished`:

    try:
        completions = dict(enumerate(dms_jax.generate(model, prompts).completions))
    except (dms_jax.CapacityError, KeyboardInterrupt) as error:
        completions = error.finished  # {index of the prompt: its completion}
"""

from collections.abc import Mapping
from typing import Any

MAX_MESSAGE = 20_000  # characters


def plain(text: object, most: int = 120, *, lines: bool = False) -> str:
    """Returns `text` for a message: shortened, and with control characters escaped.

    Args:
      text: the text to quote.
      most: the most characters; a longer text loses its middle.
      lines: whether line breaks may stay.

    # most: 20  In: "a" * 50  Out: "aaaaaaaaaa ... aaaaa"
    """
    whole = str(text)
    head, tail = most - most // 4 - 5, most // 4
    kept = [whole] if len(whole) <= most else [whole[:head], whole[-tail:]]
    kept = [part if part.isprintable() else _escape(part, lines) for part in kept]
    if len(kept) == 1 and len(kept[0]) <= most:
        return kept[0]
    return f"{kept[0][:head]} ... {kept[-1][-tail:]}"


def _escape(text: str, lines: bool) -> str:
    return "".join(
        char if char.isprintable() or (lines and char == "\n") else repr(char)[1:-1]
        for char in text
    )


class DmsJaxError(Exception):
    """Base of every error that this library raises on purpose.

    Attributes:
      finished: index in the call -> finished result: a completion, or a score of `score`.
      argument: the argument that the message begins with, "Sampling: top_p"; "" unless one was
        checked (`checks.check`).
    """

    finished: Mapping[int, Any] = {}
    argument: str = ""

    def __init__(self, message: object = ""):
        super().__init__(plain(message, MAX_MESSAGE, lines=True))

    def __reduce__(self) -> tuple[Any, ...]:
        # Restores it without its class's constructor, so that it can be sent to other processes.
        return _remade, (type(self), self.args), self.__dict__


def _remade(kind: type[DmsJaxError], arguments: tuple[Any, ...]) -> DmsJaxError:
    return kind.__new__(kind, *arguments)


class CheckpointError(DmsJaxError):
    """A checkpoint directory cannot be read or written, or contradicts its own config."""


class ConfigError(DmsJaxError):
    """A configuration is malformed, inconsistent, or not supported exactly."""


class CapacityError(DmsJaxError):
    """A request does not fit the page pool, the model's positions, or the device's memory."""


class OutOfMemoryError(CapacityError):
    """The device could not allocate the planned memory."""


class BusyError(DmsJaxError):
    """An engine was called while it was answering another call."""


class DataError(DmsJaxError):
    """Training data, evaluation data or a prompt cannot be used as given."""


class TooLongError(DataError):
    """A prompt, or a prompt and its answer, has more tokens than a sequence may have."""


class TrainingDivergedError(DmsJaxError):
    """The loss or the gradients stopped being finite."""


class OtherProcessError(DmsJaxError):
    """Another process of the run failed, and this one ended with it."""


class EngineFailedError(DmsJaxError):
    """The engine of a server failed for good, and the server ended with it."""
