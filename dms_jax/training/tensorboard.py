"""Records of a run for TensorBoard, beside the log: `train(..., on_step=TensorBoard(folder))`."""

import os
from typing import Any

from dms_jax.errors import CheckpointError, ConfigError


class TensorBoard:
    """Writes every number of each record as a scalar, by the number of its step.

    Args:
      folder: where TensorBoard is to look (`tensorboard --logdir`).

    Raises:
      ConfigError: tensorboardX is not installed.
      CheckpointError: the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike):
        try:
            import tensorboardX
        except ImportError as error:
            raise ConfigError(
                "TensorBoard takes tensorboardX: pip install 'dms-jax[tensorboard]'."
            ) from error
        try:
            self._writer = tensorboardX.SummaryWriter(os.fspath(folder))
        except OSError as error:
            raise CheckpointError(f"{folder} cannot be written: {error.strerror}.") from error

    def __call__(self, record: dict[str, Any]) -> None:
        """Writes a record; what it holds in `evaluation` is written under that name."""
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
        self._writer.close()
