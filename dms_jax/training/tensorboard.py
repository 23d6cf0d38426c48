"""Write the records of a run for TensorBoard: `train(..., on_step=TensorBoard(folder))`."""

import os
from typing import Any

from dms_jax.errors import CheckpointError
from dms_jax.extras import import_extra


class TensorBoard:
    """Writes every number of each record as a scalar, by the number of its step.

    Args:
      folder: the folder for `tensorboard --logdir`, made with the first record.

    Raises:
      ConfigError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike):
        library = import_extra("tensorboardX", extra="tensorboard", purpose="TensorBoard logging")
        self._folder, self._writer, self._open = os.fspath(folder), None, library.SummaryWriter

    def __call__(self, record: dict[str, Any]) -> None:
        """Writes a record; the numbers of its `evaluation` go under that name.

        Raises:
          CheckpointError: the folder cannot be written.
        """
        try:
            self._writer = self._writer or self._open(self._folder)
        except OSError as error:
            raise CheckpointError(f"{self._folder} cannot be written: {error.strerror}.") from error
        numbers = {f"training/{name}": value for name, value in record.items()}
        for name, value in record.get("evaluation", {}).items():
            numbers[f"evaluation/{name}"] = value
        for name, value in numbers.items():
            if isinstance(value, int | float) and name != "training/step":
                self._writer.add_scalar(name, float(value), record["step"])

    def close(self) -> None:
        """Writes pending records."""
        if self._writer is not None:
            self._writer.close()
