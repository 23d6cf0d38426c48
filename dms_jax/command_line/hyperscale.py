r"""Compare systems over lengths of answers and numbers of chains, at equal reads and equal peak.

    dms-jax hyperscale --lengths 128 256 512 --chains 1 3 9 --out runs/wider
    dms-jax hyperscale --systems Vanilla TOVA,compression_ratio=4 \
        TOVA,compression_ratio=8 DMS,model=runs/dms4,ratio=4 \
        DMS,model=runs/dms8,ratio=8

A small setting that takes about a minute on two idle CPU cores:

    dms-jax hyperscale --task words --problems 8 --lengths 192 320 \
        --chains 1 9 --systems Vanilla DMS,model=reasoner-11m-dms,ratio=8

Problems are generated from seeds or read from a file, as in `dms-jax evaluate`. With `--out` each
answer is written when it ends, and the same call resumes after the stored answers.
"""

import dataclasses
import functools
import inspect
import pathlib
import sys
from collections.abc import Callable
from typing import Any, Literal

from rich.console import Console

import dms_jax
from dms_jax.analysis.hyperscaling_plot import MOST_SYSTEMS, hyperscaling_figure
from dms_jax.checks import Count, NotNegative, Ratio, Whole, check
from dms_jax.command_line.candidates import Candidate
from dms_jax.command_line.options import (
    Devices,
    load_model,
    read_chat,
    read_files,
    read_options,
    read_tasks,
)
from dms_jax.command_line.reports import can_draw, make_folder, provenance, write_json, write_text
from dms_jax.data.tasks import Split
from dms_jax.evaluation import (
    SAMPLING,
    Hyperscaling,
    Method,
    Serving,
    System,
    terminal_table,
)

SERVING = Serving()
CALL = inspect.signature(dms_jax.hyperscale).parameters

INTERRUPTED = "Stopped. The same call with --out goes on after the answers that are there."


@dataclasses.dataclass(frozen=True)
class Config(Devices):
    """Compare systems over lengths of answers and numbers of chains."""

    model: str = "reasoner-11m"
    """Hugging Face directory, GGUF file, hub id ("owner/name"), or the name of a shipped model."""
    systems: tuple[str, ...] = (
        "Vanilla",
        "DMS,model=reasoner-11m-dms,ratio=8",
        "TOVA,compression_ratio=4",
    )
    """Each POLICY,option=value,...; besides the policy's options: name= (of the line; systems of
    one name share a frontier), model= (another checkpoint), adapter= (a directory trained on the
    model, or one that ships) and ratio= (its nominal ratio). Missing options are those that the
    checkpoint declares for this policy, otherwise the defaults."""
    task: str = "reasoning"
    """A task of dms-jax evaluate that is answered in text or by programs."""
    task_options: tuple[str, ...] = ()
    """Difficulty and length of the task, as name=value or as one JSON object."""
    allow_code: bool = False
    """Judge programs by running them, in a sandbox."""
    chat: bool = False
    """Ask through the models' chat templates."""
    system: str | None = None
    """System prompt of the chat."""
    template: tuple[str, ...] = ()
    """Variables of the chat template, as name=value (enable_thinking=false)."""
    lengths: tuple[int, ...] = (128, 256, 512)
    """L, the most new tokens of an answer."""
    chains: tuple[int, ...] = (1, 3, 9)
    """W, answers to each problem. Ties of a vote go to the first answer, so two chains score as
    one: take odd numbers."""
    problems: int | None = CALL["problems"].default
    """Problems to answer; by default all of a file, and 200 of generated ones."""
    seeds: tuple[int, ...] = CALL["seeds"].default
    """Seeds of the sampling; each samples new chains for the same problems."""
    split: Split = CALL["split"].default
    """Split of a generated task; files have no splits."""
    method: Method = "vote"
    """Method of turning chains into an answer, for frontiers and gains."""
    temperatures: tuple[float, ...] = (SAMPLING.temperature,)
    """Temperatures of the sampled chains; a greedy chain of every length is measured too."""
    top_p: float = SAMPLING.top_p
    """Keep the most likely tokens until their probability reaches this."""
    lanes: int = SERVING.lanes
    """Sequences in the cache at a time."""
    page_size: int = SERVING.page_size
    """Tokens of a page of the cache; 16 for Quest as published."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights and the cache; by default that of the files."""
    out: pathlib.Path | None = None
    """Folder for the answers, results.json, table.md and figure.png."""


def main(config: Config) -> Hyperscaling:
    """Compares the systems, prints the tables, and writes the files."""
    if config.out is not None:
        make_folder("--out", config.out)
    tasks = read_tasks(config.task, config.task_options, allow_code=config.allow_code)
    chat = read_chat(asked=config.chat, system=config.system, template=config.template)
    mesh = config.make_mesh()
    load = functools.cache(functools.partial(load_model, dtype=config.dtype, mesh=mesh))
    # Check everything before loading a model.
    for numbers in ("lengths", "chains", "seeds", "temperatures"):
        kind = dict(seeds=Whole, temperatures=NotNegative).get(numbers, Count)
        for each in getattr(config, numbers):
            check(f"--{numbers}", each, kind)
    read_files(tasks, check("--problems", config.problems, Count | None))
    sampling = dms_jax.Sampling(top_p=config.top_p)
    serving = Serving(lanes=config.lanes, page_size=config.page_size)
    for text in config.systems:
        parse_system(text, config.model)
    systems = [read_system(text, config.model, load) for text in config.systems]
    result = dms_jax.hyperscale(
        load(config.model, None),
        tasks,
        systems,
        lengths=config.lengths,
        chains=config.chains,
        problems=config.problems,
        split=config.split,
        seeds=config.seeds,
        sampling=sampling,
        temperatures=config.temperatures,
        chat=chat,
        serving=serving,
        out=config.out,
        progress=True,
    )
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(result.rich_table(config.method))
    print(
        f"Gains between frontiers by {config.method}, averaged over the budgets that both\ncover, "
        "greedy points included:"
    )
    console.print(terminal_table(result.gain_rows(config.method)))
    print(
        "In percent, ± one standard error. reads, peak: tokens of all chains of a"
        "\nproblem, averages over layers and heads. L-W-CR@T: longest answer, chains,"
        "\nnominal ratio, temperature. --out keeps the scores by every method."
    )
    if config.out is not None:
        data = {**provenance(config), **result.to_dict(config.method)}
        write_json(config.out / "results.json", data)
        table = f"{result.table(config.method)}\n\n{result.gains_table(config.method)}\n"
        write_text(config.out / "table.md", table)
        figure = config.out / "figure.png"
        if len(result.systems) <= MOST_SYSTEMS and can_draw(figure):
            hyperscaling_figure(figure, result, title=config.task, method=config.method)
    return result


def parse_system(text: str, default: str) -> tuple[Candidate, Any]:
    """Reads POLICY,option=value,...; returns the system, and its nominal ratio or None.

    Args:
      text: the option's text; "DMS,model=reasoner-11m-dms,ratio=8" is DMS as the checkpoint
        declares it.
      default: the model of a system without model=.

    Raises:
      ConfigError: the policy or an option is unknown.
    """
    policy, *given = text.split(",")
    options = read_options(given, "--systems")
    adapter, path = options.pop("adapter", None), str(options.pop("model", default))
    name, ratio = options.pop("name", policy), options.pop("ratio", None)
    check("--systems: ratio", ratio, Ratio | None)
    named = dms_jax.policies.from_dict({**options, "name": policy})
    adapter = None if adapter is None else str(adapter)
    return Candidate(str(name), named, options, path, adapter), ratio


def read_system(text: str, default: str, load: Callable[..., dms_jax.LanguageModel]) -> System:
    """Returns the system of a text (`parse_system`), with its model.

    Args:
      text: the option's text.
      default: the model of a system without model=.
      load: takes the name of a model and that of an adapter, or None.
    """
    read, ratio = parse_system(text, default)
    model = load(read.model, read.adapter)
    return System(read.name, read.policy_for(model), model, ratio)
