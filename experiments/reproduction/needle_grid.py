"""Hide a needle at every depth of contexts of every length, and draw where it is found.

    python -m experiments.reproduction.needle_grid
    python -m experiments.reproduction.needle_grid --model MODEL --compressed MODEL-DMS \
        --lengths 4096 8192 16384 32768 --budget 1024 --essays PaulGrahamEssays.json

A number in an essay (RULER's niah_single_2), looked for with the whole cache, with the first and
the last tokens alone (StreamingLLM), and with DMS. What was answered stays in the folder, and the
same call goes on after it.
"""

import dataclasses
import pathlib
import sys
from typing import Any

import dms_jax
from dms_jax import assets
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.evaluation import Serving
from dms_jax.evaluation.tasks import RULER
from dms_jax.evaluation.tasks.ruler import RulerName
from experiments.reproduction.needle_cells import DEPTHS, NeedleGrid, needle_grid
from experiments.reproduction.needle_plot import needle_figure


@dataclasses.dataclass(frozen=True)
class Config:
    """Hide a needle at every depth of contexts of every length, and draw where it is found."""

    model: str = ""
    """Hugging Face directory or hub id; the shipped reasoning model unless given."""
    compressed: str = ""
    """The model that was retrofitted with DMS; the shipped one unless given."""
    task: RulerName = "niah_single_2"
    """A task of RULER that hides a single needle."""
    lengths: tuple[int, ...] = (256, 512, 1024)
    """Tokens of a prompt and its answer."""
    depths: tuple[float, ...] = DEPTHS
    """Percent of the context before the needle."""
    problems: int = 10
    """Problems at each depth of each length."""
    budget: int = 128
    """Tokens that StreamingLLM keeps of a prompt and its answer."""
    essays: pathlib.Path | None = None
    """Text to hide needles in; the shipped novels unless given."""
    max_new_tokens: int = 16
    """Longest answer, within RULER's 128."""
    lanes: int = 64
    """Sequences in the cache at a time."""
    out: pathlib.Path = pathlib.Path("runs/needle_grid")
    """Folder for the answers, needle_grid.json and needle_grid.png."""


def main(config: Config) -> dict[str, Any]:
    """Fills the grids one after the other, writes the figures and draws them."""
    make_folder("--out", config.out)
    plain = config.model or str(assets.path("reasoner-11m"))
    retrofitted = config.compressed or str(assets.path("reasoner-11m-dms"))
    systems = {
        "vanilla": (plain, dms_jax.Vanilla()),
        f"StreamingLLM, {config.budget} tokens": (
            plain,
            dms_jax.StreamingLLM(budget=config.budget),
        ),
        "DMS": (retrofitted, None),
    }
    grids: dict[str, NeedleGrid] = {}
    for number, (label, (path, policy)) in enumerate(systems.items()):
        grids[label] = needle_grid(
            dms_jax.load(path),
            policy,
            lengths=config.lengths,
            depths=config.depths,
            problems=config.problems,
            task=RULER(config.task, essays=config.essays),
            sampling=dms_jax.Sampling(temperature=0, max_new_tokens=config.max_new_tokens),
            serving=Serving(lanes=config.lanes),
            out=config.out / f"answers-{number}",
            progress=sys.stderr.isatty(),
        )
        peaks = ", ".join(f"{peak:,.0f}" for peak in grids[label].peak)
        print(f"{label}: {100 * grids[label].accuracy:.0f}% found; tokens at the peak: {peaks}")
    data = {
        **provenance(config),
        "grids": {label: grid.to_dict() for label, grid in grids.items()},
    }
    write_json(config.out / "needle_grid.json", data)
    needle_figure(config.out / "needle_grid.png", grids)
    return data


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
