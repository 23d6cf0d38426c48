"""The progress bar of a training run: losses, compression ratios and tokens per second."""

from typing import Any

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

# With the other columns each fits 80 characters: otherwise rich cuts the text or drops columns.
_COMPRESSING = (
    "{task.fields[main]} {task.fields[main_loss]:.3f} + CR {task.fields[compression_loss]:.3f}, "
    "ratio {task.fields[compression_ratio]:.2f} of {task.fields[target_ratio]:.2f}, "
    "{task.fields[tokens_per_second]:,.0f} tok/s"
)
_PLAIN = (
    "{task.fields[main]} {task.fields[main_loss]:.3f}, {task.fields[tokens_per_second]:,.0f} tok/s"
    "{task.fields[utilisation]}"
)
_SHORT = {"distillation": "KL", "language modeling": "LM"}


class Display:
    """The progress bar of a run.

    Args:
      total, done: optimizer steps in total, and those already done.
      main: name of the main loss, which the compression loss is added to.
      compressing: whether the run compresses the cache.
      enabled: whether to show anything.
    """

    def __init__(self, *, total: int, done: int, main: str, compressing: bool, enabled: bool):
        self._progress = Progress(
            MofNCompleteColumn(),
            BarColumn(bar_width=5),
            TextColumn(_COMPRESSING if compressing else _PLAIN),
            TimeRemainingColumn(),
            disable=not enabled,
        )
        zeros = dict.fromkeys(("main_loss", "compression_loss", "tokens_per_second"), 0.0)
        self._task = self._progress.add_task(
            "training",
            total=total,
            completed=done,
            main=_SHORT.get(main, main),
            compression_ratio=1.0,
            target_ratio=1.0,
            utilisation="",
            **zeros,
        )

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._progress.stop()

    def update(self, record: dict[str, Any]) -> None:
        """Shows the record of a step."""
        fields = {key: value for key, value in record.items() if key != "step"}
        fields["main_loss"] = record["loss"] - record["compression_loss"]
        share = record["model_flops_utilisation"]
        fields["utilisation"] = "" if share is None else f", {share:.0%} of peak"
        self._progress.update(self._task, completed=record["step"], **fields)
