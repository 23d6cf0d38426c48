"""Dynamic Memory Compression on real input: retrofit a small pretrained Llama, decode, measure.

stories260K, which ships with the library, learns to merge to each compression ratio on a megabyte
of TinyStories. Then held-out text goes token by token through the paged cache: dense, DMC, the same
weights with merging switched off (what the lost neuron costs by itself), and a plain window of
recent tokens with as many of them live. Everything in the table is measured.

    python -m experiments.reproduction.dmc_stories --help
"""

import dataclasses
import json
import pathlib
import sys

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

import dms_jax
from dms_jax import assets
from dms_jax.command_line.demos.quickstart import LENGTH, Bench, Row, held_out
from dms_jax.command_line.reports import make_folder, provenance
from dms_jax.command_line.running import run
from dms_jax.json_text import json_text
from dms_jax.training import recipes
from experiments.reproduction.files import error_text


@dataclasses.dataclass(frozen=True)
class Config:
    """Retrofit stories260K with DMC and decode from a small cache."""

    out: pathlib.Path = pathlib.Path("runs/dmc_stories")
    """Folder for results.json and the runs, which are resumed where they stopped."""
    ratios: tuple[float, ...] = (2.0, 4.0)
    """Compression ratios to aim at, each in a run of its own; what is reached is measured."""
    sequences: int = 64
    """Held-out sequences of 512 tokens to decode."""
    page_size: int = 16
    """Tokens a page of the cache."""
    seed: int = 0
    """Order of the training text and the training noise."""


POLICY = dms_jax.DMC(neuron="first", offset=2.0, temperature=0.3)
NEVER = 1e6  # an offset that no neuron reaches


def main(config: Config) -> list[Row]:
    """Runs all of it and returns the table."""
    console = Console(width=None if sys.stdout.isatty() else 112)
    make_folder("--out", config.out)
    base = dms_jax.load(str(assets.path("stories260k")))
    bench = Bench(
        held_out(base, config.sequences),
        config.page_size,
        lambda row: console.print(f"  {row.label}: {row.nats:.4f} nats, {row.seconds:.0f} s"),
    )
    bench.run("dense", "dense", base, dms_jax.Vanilla())
    seconds = {}
    for ratio in config.ratios:
        console.print(f"[bold]Retrofit[/bold] to compression ratio {ratio:g}")
        out = config.out / f"ratio-{ratio:g}"
        model = dms_jax.retrofit(
            base,
            POLICY,
            recipe=recipes.dmc_quickstart(ratio),
            data=[assets.path("tinystories") / "train.txt"],
            out=out,
            seed=config.seed,
        )
        log = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
        seconds[f"{ratio:g}"] = sum(record["seconds"] for record in log)
        row = bench.run(f"DMC, CR {ratio:g}", "DMC", model, POLICY)
        never = dataclasses.replace(POLICY, offset=NEVER)
        bench.run("  its weights, nothing merged", "DMC", model, never)
        peak = max(round(row.peak_tokens), 6)
        window = dms_jax.StreamingLLM(budget=peak)
        bench.run(f"  StreamingLLM {peak}, equal peak", "StreamingLLM", base, window)
    show(console, bench.rows)
    results = provenance(config) | {
        "held_out_tokens": config.sequences * (LENGTH - 1),
        "training_seconds": seconds,
        "recipes": [dataclasses.asdict(recipes.dmc_quickstart(ratio)) for ratio in config.ratios],
        "rows": [dataclasses.asdict(row) for row in bench.rows],
    }
    (config.out / "results.json").write_text(json_text(results, indent=1) + "\n")
    console.print(f"Written: {config.out / 'results.json'}", highlight=False)
    return bench.rows


def show(console: Console, rows: list[Row]) -> None:
    """Prints the table."""
    table = Table(box=SIMPLE)
    for name in ("", "nats", "over dense", "live tokens", "fewer live", "fewer reads"):
        table.add_column(name, justify="right" if name else "left")
    for row in rows:
        table.add_row(
            row.label,
            f"{row.nats:.4f}",
            f"{row.increase:+.4f} {error_text(row.increase_error, '.4f')}",
            f"{row.peak_tokens:.0f}",
            f"{row.peak_ratio:.2f}x",
            f"{row.reads_ratio:.2f}x",
        )
    console.print(table)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
