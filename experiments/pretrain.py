"""Train a small Llama-shaped model from scratch on reasoning, retrieval and prose.

    python -m experiments.pretrain --out runs/reasoner --minutes 9
    python -m experiments.pretrain --out runs/again --steps 16000
    python -m experiments.pretrain --help

Data are made from seeds while the model trains (`experiments.mixture`); nothing repeats. With
--minutes the number of steps is chosen by timing some beforehand and written to out/plan.json and
out/summary.json: --steps with that number repeats the run on any machine.

Writes log.jsonl (every step, with the held-out loss of each part now and then), curves.png, model/
(float32, to go on from), bfloat16/ (to use), summary.json.
"""

import dataclasses
import datetime
import itertools
import json
import math
import os
import pathlib
import random
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import run
from dms_jax.data.batches import Batch
from dms_jax.json_text import json_text
from dms_jax.training import held_out_loss
from experiments.configs.pretrain import Config
from experiments.mixture import Mixture, MixtureBatches, standard_parts

# Steps that are timed: the first of them compiles, and the last ones count.
TIMED_STEPS, COUNTED_STEPS = 80, 40
# Seconds that are kept back for writing the models.
RESERVE = 10.0
PANEL = 5  # parts that a picture has beside each other


def main(config: Config) -> None:
    """Trains the model, or as much of it as `stop_after_minutes` allows."""
    began = time.perf_counter()
    if jax.config.jax_compilation_cache_dir is None:  # the step is compiled once for both uses
        jax.config.update("jax_compilation_cache_dir", str(config.out.absolute() / ".compiled"))
    make_folder("--out", config.out)
    model, mixture = prepare(config)
    held_out = held_out_batches(mixture, config.held_out_sequences)
    evaluate = lambda model: held_out_loss(model, held_out)  # noqa: E731
    cores = os.cpu_count() or 1
    workers = max(cores - 2, 0) if config.workers is None else config.workers
    source = mixture.batches(workers=workers)
    try:
        plan = make_plan(config, model, source, evaluate, began)
        print(f"{plan['steps']} steps of {config.batch_size} x {config.sequence_length} tokens")
        source.set_state({"step": 0})
        left = None
        if config.stop_after_minutes is not None:
            left = max(began + 60 * config.stop_after_minutes - time.perf_counter(), 0.001)
        trained = dms_jax.train(
            model,
            recipe=config.make_recipe(plan["steps"]),
            data=source,
            out=config.out,
            seed=config.seed,
            checkpoint_every=config.checkpoint_every,
            stop_after=left,
            evaluate=evaluate,
            evaluate_every=config.evaluate_every,
        )
    except KeyboardInterrupt as stopped:
        if config.stop_after_minutes is None:
            raise
        print(f"{stopped}. Run the same command to go on.")
        return
    finally:
        source.close()
    dms_jax.save(in_bfloat16(trained), trained.policy, config.out / "bfloat16")
    records = read_log(config.out / "log.jsonl")
    summary = summarise(config, plan, trained, records, time.perf_counter() - began)
    write_json(config.out / "summary.json", summary)
    draw(records, config.out / "curves.png")
    print(json_text(summary["result"], indent=2))


def prepare(config: Config) -> tuple[dms_jax.LanguageModel, Mixture]:
    """The model to train, and the data to train it on."""
    for name, least in (("held_out_sequences", 1), ("workers", 0)):
        value = getattr(config, name)
        if value is not None and value < least:
            raise dms_jax.ConfigError(f"--{name.replace('_', '-')} must be >= {least}, got {value}")
    if config.steps is None and not config.minutes > 0:
        raise dms_jax.ConfigError(f"--minutes must be above 0, got {config.minutes}")
    directory = config.tokenizer or assets.path("reasoner-11m")
    tokenizer = Tokenizer.from_directory(directory)
    if tokenizer is None:
        raise dms_jax.ConfigError(f"there is no tokenizer.json in {directory}")
    if config.start_from is not None:
        model = dms_jax.load(config.start_from, dtype="float32")
    else:
        shape = config.make_model_config(tokenizer.vocab_size)
        model = dms_jax.initialize(shape, seed=config.seed, tokenizer=tokenizer)
    mixture = Mixture(
        tokenizer,
        standard_parts(config.slips),
        batch_size=config.batch_size,
        length=config.sequence_length,
        seed=config.seed,
    )
    return model, mixture


def make_plan(
    config: Config,
    model: dms_jax.LanguageModel,
    source: MixtureBatches,
    evaluate: Callable[[dms_jax.LanguageModel], dict[str, float]],
    began: float,
) -> dict[str, Any]:
    """How many steps to take: as told, as an earlier call has planned, or as many as there is time.

    Timing trains a throw-away copy on the first batches, with evaluations at its end.
    """
    path = config.out / "plan.json"
    if config.steps is not None:
        return {"steps": config.steps}
    if path.exists():
        return json.loads(path.read_text(encoding="utf-8"))
    records: list[dict[str, Any]] = []
    dms_jax.train(
        model,
        recipe=config.make_recipe(TIMED_STEPS),
        data=source,
        on_step=records.append,
        progress=False,
    )
    evaluate(model)
    start = time.perf_counter()
    evaluate(model)
    evaluation = time.perf_counter() - start
    compilation = records[0]["seconds"]
    step = statistics.fmean(record["seconds"] for record in records[-COUNTED_STEPS:])
    # The second compilation comes from a cache, where there is one.
    left = began + 60 * config.minutes - time.perf_counter() - compilation - RESERVE
    steps = max(1, int(left / (step + evaluation / config.evaluate_every)))
    plan = {
        "steps": steps,
        "minutes": config.minutes,
        "timed": {
            "compilation_seconds": compilation,
            "step_seconds": step,
            "evaluation_seconds": evaluation,
        },
    }
    write_json(path, plan)
    return plan


def held_out_batches(mixture: Mixture, sequences: int) -> dict[str, list[Batch]]:
    """A batch of every part of the mixture from its validation split, stories and books beside."""
    tokenizer, length = mixture.tokenizer, mixture.length
    validation = dataclasses.replace(mixture, split="validation")
    batches = {}
    for part in mixture.parts:
        rng = random.Random(f"held out {part.name}")
        drawn = (validation.document(part, rng) for _ in itertools.count())
        batches[part.name] = [pack(drawn, sequences, length)]
    for name, texts in (("stories", assets.stories("valid")), ("text", assets.books("validation"))):
        cut = itertools.cycle(texts)
        prose = (prose_document(tokenizer, text, length) for text in cut)
        batches[name] = [pack(prose, sequences, length)]
    return batches


def prose_document(tokenizer: Tokenizer, text: str, length: int) -> tuple[list[int], int]:
    """A text, or its beginning; all of it counts but the begin token."""
    # A token is hardly ever longer than eight characters.
    ids = tokenizer.encode(text[: 8 * length], add_special_tokens=False)
    return [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id][:length], 1


def pack(documents: Iterator[tuple[list[int], int]], sequences: int, length: int) -> Batch:
    """Puts documents (ids, how many of them do not count) into sequences, in order.

    Raises:
      DataError: a thousand documents on end are longer than a sequence.
    """
    shape = (sequences, length)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    counts = np.zeros(shape, bool)
    row = filled = segment = too_long = 0
    for ids, silent in documents:
        if len(ids) > length:
            too_long += 1
            if too_long == 1000:
                raise dms_jax.DataError(f"the documents are longer than {length} tokens")
            continue
        too_long = 0
        if filled + len(ids) > length:
            row, filled, segment = row + 1, 0, 0
            if row == sequences:
                break
        end, segment = filled + len(ids), segment + 1
        tokens[row, filled:end] = ids
        segments[row, filled:end] = segment
        counts[row, filled + silent : end] = True
        filled = end
    return {"tokens": tokens, "segment_ids": segments, "loss_mask": counts}


def in_bfloat16(model: dms_jax.LanguageModel) -> dms_jax.LanguageModel:
    """The model as it ships."""
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), model.transformer)
    return dataclasses.replace(model, transformer=narrow)


def read_log(path: pathlib.Path) -> list[dict[str, Any]]:
    """The records of all steps."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_json(path: pathlib.Path, content: dict[str, Any]) -> None:
    """Writes a file beside its place and renames it."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(json_text(content, indent=2, default=str) + "\n", encoding="utf-8")
    beside.replace(path)


def command(config: Config, steps: int) -> str:
    """How to repeat a run anywhere."""
    default = Config()
    words = ["python", "-m", "experiments.pretrain", "--steps", str(steps)]
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        skipped = ("out", "minutes", "steps", "stop_after_minutes", "workers")
        if field.name not in skipped and value != getattr(default, field.name):
            words += [f"--{field.name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def summarise(
    config: Config,
    plan: dict[str, Any],
    model: dms_jax.LanguageModel,
    records: list[dict[str, Any]],
    seconds: float,
) -> dict[str, Any]:
    """What was trained, on what, how fast, and how well."""
    shares = [record["model_flops_utilisation"] for record in records]
    known = [share for share in shares if share is not None]
    steady = records[len(records) // 10 :]
    losses = [record["lm_loss"] for record in records[-100:] if record["lm_loss"] is not None]
    return {
        "result": {
            "held_out_loss": records[-1]["evaluation"],
            "training_loss": statistics.fmean(losses),
            "steps": len(records),
            "tokens": sum(record["tokens"] for record in records),
            "parameters": sum(x.size for x in jax.tree.leaves(model.transformer)),
            "tokens_per_second": statistics.median(x["tokens_per_second"] for x in steady),
            "model_flops_utilisation": statistics.median(known) if known else None,
            "share_of_time_waiting_for_data": sum(x["data_seconds"] for x in steady)
            / sum(x["seconds"] for x in steady),
            "visible_keys": statistics.fmean(x["visible_keys"] for x in steady if not x["skipped"]),
            "seconds_of_this_call": seconds,
        },
        "plan": plan,
        "command": command(config, plan["steps"]),
        "config": dataclasses.asdict(config),
        "recipe": dataclasses.asdict(config.make_recipe(plan["steps"])),
        "model": dataclasses.asdict(model.config),
        "device": jax.devices()[0].device_kind,
        "versions": {name: metadata.version(name) for name in ("jax", "flax", "optax", "numpy")},
        "date": datetime.date.today().isoformat(),
    }


def draw(records: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the loss of training and of each held-out part against tokens, five parts a panel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    tokens = np.cumsum([record["tokens"] for record in records]) / 1e6
    # What was not finite is null in the log: steps that were skipped.
    known = [(t, r["lm_loss"]) for t, r in zip(tokens, records, strict=True) if not r["skipped"]]
    window = max(1, len(known) // 200)
    smooth = np.convolve([x for _, x in known], np.ones(window) / window, mode="valid")
    ends = [t for t, _ in known[window - 1 :]]
    measured = [
        (t, r["evaluation"]) for t, r in zip(tokens, records, strict=True) if "evaluation" in r
    ]
    lines = {
        name: [math.nan if each[name] is None else each[name] for _, each in measured]
        for name in measured[-1][1]
    }
    names = sorted(lines, key=lambda name: -np.nan_to_num(lines[name][-1], nan=math.inf))
    panels = [names[i : i + PANEL] for i in range(0, len(names), PANEL)]
    figure, grid = plt.subplots(
        *(1, len(panels)),
        figsize=(1 + 5 * len(panels), 4.8),
        layout="constrained",
        squeeze=False,
        sharey=True,
    )
    for axes, panel in zip(grid[0], panels, strict=True):
        axes.plot(ends, smooth, color="0.7", linewidth=1, label="training, all parts")
        for name in panel:
            label = f"{name}  {lines[name][-1]:.2g}"
            axes.plot([t for t, _ in measured], lines[name], marker=".", linewidth=1.2, label=label)
        axes.set(xlabel="million tokens", yscale="log")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    grid[0][0].set_ylabel("loss (nats a token)")
    figure.suptitle("Held-out loss of each part, and the last one", fontsize=11)
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    again = "Interrupted. Run the same command to go on."
    sys.exit(run(main, Config, description=__doc__, interrupted=again))
