"""The errors of this library: every one derives from `DmsJaxError`.

A message says what was wrong, where, and what to do about it.

Whatever leaves `generate`, `score` or `evaluate` once they run (one of these errors, an interrupt,
an error of a callback) has what was finished by then as its attribute `finished`:

    try:
        completions = dict(enumerate(dms_jax.generate(model, prompts).completions))
    except (dms_jax.CapacityError, KeyboardInterrupt) as error:
        completions = error.finished  # {index of the prompt: its completion}
"""

from collections.abc import Mapping
from typing import Any


class DmsJaxError(Exception):
    """Base of every error that this library raises on purpose.

    Attributes:
      finished: what was done by then, by its place in the call: completions, or scores of `score`.
    """

    finished: Mapping[int, Any] = {}


class CheckpointError(DmsJaxError):
    """A checkpoint directory cannot be read, written, or does not fit its own config."""


class ConfigError(DmsJaxError):
    """A configuration is malformed, inconsistent, or asks for what is not served exactly."""


class CapacityError(DmsJaxError):
    """A request does not fit: the page pool, the model's positions, or the device's memory."""


class BusyError(DmsJaxError):
    """An engine or a conversation was called while it was answering another call."""


class DataError(DmsJaxError):
    """Training or evaluation data, or a prompt, cannot be used as given."""


class TrainingDivergedError(DmsJaxError):
    """The loss or the gradients stopped being finite."""
