"""How long a run stops for an export at a ratio on the way, and how long writing its files takes.

pause    from the end of the step to the next one: the copy of what is trained, and its way to the
         host. The files are written behind the next steps.
save     `dms_jax.save` of the same model: what the step would wait for if it wrote the files itself

    python -m experiments.benchmarks.export_pause --out runs/export_pause.json

Three exports of each run; random weights, random tokens. A second export waits for the first, and
steps of so small a model are faster than a disk: the run goes on when the files are written, as
they long are in a run whose exports are minutes apart.
"""

import dataclasses
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

import dms_jax
from dms_jax.command_line.reports import make_place, write_json
from dms_jax.command_line.running import command, run
from dms_jax.config import ModelConfig
from dms_jax.training.recipe import Recipe, Stage
from experiments.benchmarks.kernel_timing import environment
from experiments.benchmarks.settings import check_numbers

# Model dim, layers, vocabulary.
SHAPES = {"120m": (1024, 8, 16384), "tiny": (64, 2, 64)}
Trained = Literal["all", "adapter"]
RATIOS = (1.75, 2.5, 3.25)
POLICY = dms_jax.DMS(window=16, source="adapter")


@dataclasses.dataclass(frozen=True)
class Config:
    """Time the pauses for exports."""

    shape: Literal["120m", "tiny"] = "120m"
    """Model that is trained, with random weights: 428 MB, or hardly any."""
    trainable: tuple[Trained, ...] = ("all", "adapter")
    """What is trained: all weights, or the adapter beside frozen ones."""
    steps: int = 24
    """Steps of a run; the ratio rises to 4."""
    sequence_length: int = 64
    """Tokens of a step."""
    out: pathlib.Path = pathlib.Path("runs/export_pause.json")
    """JSON file for the figures, with device, versions, date and command."""

    def __post_init__(self):
        check_numbers(self)


def config_of(shape: str) -> ModelConfig:
    """The shape of a Llama of some size, with heads of 64."""
    width, layers, vocabulary = SHAPES[shape]
    return ModelConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=11 * width // 4,
        num_layers=layers,
        num_heads=width // 64,
        num_kv_heads=max(1, width // 256),
        head_dim=64,
        max_position_embeddings=4096,
        tie_embeddings=True,
        model_type="llama",
    )


def wait_for(written: pathlib.Path, most: float = 300) -> None:
    """Waits until an export is there, which is renamed to its place when it is complete."""
    start = time.perf_counter()
    while not written.exists():
        if time.perf_counter() - start > most:
            raise TimeoutError(f"{written} is not written after {most} s")
        time.sleep(0.01)


def time_exports(config: Config, trainable: Trained, folder: pathlib.Path) -> dict[str, Any]:
    """Trains with exports on the way; returns the pauses, and the seconds of writing by itself."""
    model = dms_jax.initialize(config_of(config.shape))
    ended: dict[int, float] = {}  # when the record of a step was read
    begun: dict[int, float] = {}  # when the batch of a step was drawn

    def rows() -> Iterator[dict[str, np.ndarray]]:
        random = np.random.default_rng(0)
        for step in range(1, config.steps + 1):
            begun[step] = time.perf_counter()
            if step - 1 in exported:
                wait_for(folder / "run" / "snapshots" / f"{exported[step - 1]:g}")
            tokens = random.integers(0, model.config.vocab_size, (1, config.sequence_length))
            yield {"tokens": tokens.astype(np.int32)}

    exported: dict[int, float] = {}  # ratios by the step after which they are exported
    recipe = Recipe(
        name="exports",
        stages=(Stage("ramp", config.steps, 1e-5, 4.0),),
        sequence_length=config.sequence_length,
        batch_size=1,
        trainable=trainable,
        compute_dtype=None,
        snapshots=RATIOS,
    )
    result = dms_jax.retrofit(
        model,
        POLICY,
        recipe=recipe,
        data=rows(),
        out=folder / "run",
        on_step=lambda record: ended.__setitem__(record["step"], time.perf_counter()),
        on_snapshot=lambda ratio, _: exported.__setitem__(max(ended), ratio),
        progress=False,
        checkpoint_every=config.steps,
    )
    saves = []
    for _ in RATIOS:
        start = time.perf_counter()
        dms_jax.save(result, POLICY, folder / "saved")
        saves.append(time.perf_counter() - start)
    size = sum(file.stat().st_size for file in (folder / "saved").iterdir())
    pauses = [begun[step + 1] - ended[step] for step in exported]
    return dict(
        trainable=trainable,
        bytes=size,
        pause_seconds=pauses,
        median_pause_seconds=statistics.median(pauses),
        save_seconds=saves,
        median_save_seconds=statistics.median(saves),
    )


def main(config: Config) -> list[dict[str, Any]]:
    """Times every kind of training, writes the figures as they come, and returns them."""
    make_place("--out", config.out)
    rows: list[dict[str, Any]] = []
    report = environment() | dict(command=command(), shape=config.shape, rows=rows)
    for trainable in config.trainable:
        with tempfile.TemporaryDirectory(dir=config.out.parent) as folder:
            rows.append(time_exports(config, trainable, pathlib.Path(folder)))
        print(rows[-1], flush=True)
        write_json(config.out, report)
    return rows


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
