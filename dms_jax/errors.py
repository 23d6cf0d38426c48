"""The errors of this library: every one derives from `DmsJaxError`.

A message says what was wrong, where, and what to do about it.
"""


class DmsJaxError(Exception):
    """Base of every error that this library raises on purpose."""


class CheckpointError(DmsJaxError):
    """A checkpoint directory cannot be read, written, or does not fit its own config."""


class ConfigError(DmsJaxError):
    """A configuration is malformed, inconsistent, or asks for what is not served exactly."""


class CapacityError(DmsJaxError):
    """A request does not fit: the page pool, the model's positions, or the device's memory."""


class DataError(DmsJaxError):
    """Training or evaluation data, or a prompt, cannot be used as given."""


class TrainingDivergedError(DmsJaxError):
    """The loss or the gradients stopped being finite."""
