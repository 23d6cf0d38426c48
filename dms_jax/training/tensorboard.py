"""Records of a run for TensorBoard, beside the log: `train(..., on_step=TensorBoard(folder))`."""

import os
from typing import Any

from dms_jax.errors import CheckpointError, ConfigError


class TensorBoard:
    """Writes every number of each record as a scalar, by the number of its step.

    Args:
      folder: where TensorBoard is to look (`tensorboard --logdir`); made with the first record.

    Raises:
      ConfigError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike):
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                "TensorBoard takes tensorboardX: pip install 'dms-jax[tensorboard]'."
            ) from error
        self._open, self._folder, self._writer = SummaryWriter, os.fspath(folder), None

    def __call__(self, record: dict[str, Any]) -> None:
        """Writes a record; what it holds in `evaluation` is written under that name.

        Raises:
          CheckpointError: the folder cannot be written.
        """
        if self._writer is None:
            try:
                self._writer = self._open(self._folder)
            except OSError as error:
                raise CheckpointError(
                    f"{self._folder} cannot be written: {error.strerror}."
                ) from error
        step = record["step"]
        numbers = {name: value for name, value in record.items() if name != "step"}
        for name, value in numbers.pop("evaluation", {}).items():
            numbers[f"evaluation/{name}"] = value
        for name, value in numbers.items():
            if isinstance(value, int | float):
                place = name if "/" in name else f"training/{name}"
                self._writer.add_scalar(place, float(value), step)

    def close(self) -> None:
        """Writes what is left."""
        if self._writer is not None:
            self._writer.close()
