"""Train a small Llama-shaped model from scratch on reasoning, retrieval and prose.

    python -m experiments.pretrain --out runs/reasoner
    python -m experiments.pretrain --out runs/slips --steps 900 --seed 1 --slips 0.2 \
        --start-from runs/reasoner/model --learning-rate 5e-4 --warmup-steps 50

The two commands make a model like the shipped reasoner-11m. Data are generated from seeds during
training (`experiments.mixture`); nothing repeats. After Ctrl-C, the same command resumes from its
last checkpoint.

Writes log.jsonl (every step, and at intervals the held-out loss of each part of the data),
curves.png, model/ (float32, for further training), bfloat16/ (for use), summary.json.
"""

import dataclasses
import itertools
import json
import math
import os
import pathlib
import random
import statistics
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import dms_jax
from dms_jax import ModelConfig, assets, recipes
from dms_jax.checkpoint import Tokenizer
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.data.batches import Batch
from dms_jax.json_text import json_text
from dms_jax.training import held_out_loss
from experiments.mixture import Mixture, Part, standard_parts


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a small model from scratch on tasks and prose that are generated during training."""

    out: pathlib.Path = pathlib.Path("runs/reasoner")
    """Directory of the run: checkpoints, log, curves, models, summary. An existing run is resumed.
    """
    steps: int = 5878
    """Optimizer steps."""
    start_from: pathlib.Path | None = None
    """Hugging Face directory to start from with a fresh optimizer; give another seed with it."""

    slips: float = 0.0
    """Probability that a step of a worked solution is wrong in one digit (tasks' `slips`)."""
    hidden_size: int = 320
    """E, the width of the residual stream."""
    intermediate_size: int = 896
    """F, the width of the feed-forward networks."""
    num_layers: int = 8
    """L, the number of layers."""
    num_heads: int = 8
    """H, the query heads of a layer."""
    num_kv_heads: int = 2
    """K, the key-value heads of a layer."""
    head_dim: int = 64
    """D, the dimensions of a head."""

    sequence_length: int = 2048
    """Tokens of a training sequence; the model's positions."""
    batch_size: int = 64
    """Sequences of an optimizer step."""
    learning_rate: float = 2e-3
    """Learning rate at its peak, after the warm-up."""
    warmup_steps: int = 300
    """Steps over which the rate rises."""

    evaluate_every: int = 500
    """Steps between measurements of the held-out loss."""
    held_out: int = 64
    """Documents of each part for the held-out loss."""
    checkpoint_every: int = 1000
    """Steps between checkpoints to resume from; Ctrl-C writes one too."""
    workers: int | None = None
    """Processes that generate batches, 0 for none; by default all cores but two."""
    seed: int = 0
    """Seed of the parameters and of the data."""

    def __post_init__(self):
        for name, least in (("held_out", 1), ("workers", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise dms_jax.ConfigError(
                    f"--{name.replace('_', '-')} must be >= {least}, got {value}"
                )


def main(config: Config) -> None:
    """Trains the model and writes it with its figures."""
    make_folder("--out", config.out)
    model, mixture = prepare(config)
    held_out = held_out_batches(mixture, config.held_out)
    workers = max((os.cpu_count() or 1) - 2, 0) if config.workers is None else config.workers
    source = mixture.batches(workers=workers)
    try:
        trained = dms_jax.train(
            model,
            recipe=recipes.pretraining(
                config.steps,
                learning_rate=config.learning_rate,
                warmup_steps=config.warmup_steps,
                sequence_length=config.sequence_length,
                batch_size=config.batch_size,
            ),
            data=source,
            out=config.out,
            seed=config.seed,
            checkpoint_every=config.checkpoint_every,
            evaluate=lambda model: held_out_loss(model, held_out),
            evaluate_every=config.evaluate_every,
        )
    finally:
        source.close()
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), trained.transformer)
    shipped = dataclasses.replace(trained, transformer=narrow)
    dms_jax.save(shipped, trained.policy, config.out / "bfloat16")
    lines = (config.out / "log.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    result = summarise(trained, records)
    write_json(config.out / "summary.json", provenance(config) | {"result": result})
    draw(records, config.out / "curves.png")
    print(json_text(result, indent=2))


def prepare(config: Config) -> tuple[dms_jax.LanguageModel, Mixture]:
    """Returns the model to train, with the shipped tokenizer, and the data to train it on."""
    tokenizer = Tokenizer.from_directory(assets.path("reasoner-11m"))
    assert tokenizer is not None
    if config.start_from is not None:
        model = dms_jax.load(config.start_from, dtype="float32")
    else:
        shape = ModelConfig(
            vocab_size=tokenizer.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_layers=config.num_layers,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.sequence_length,
            tie_embeddings=True,
        )
        model = dms_jax.initialize(shape, seed=config.seed, tokenizer=tokenizer)
    mixture = Mixture(
        tokenizer,
        standard_parts(config.slips),
        batch_size=config.batch_size,
        length=config.sequence_length,
        seed=config.seed,
    )
    return model, mixture


def held_out_batches(mixture: Mixture, count: int) -> dict[str, list[Batch]]:
    """Returns a batch of each part of the mixture's validation split, of stories and of books."""
    validation = dataclasses.replace(mixture, split="validation")

    def drawn(part: Part) -> Iterator[tuple[list[int], int]]:
        rng = random.Random(f"held out {part.name}")
        while True:
            yield validation.document(part, rng)

    def prose(texts: list[str]) -> Iterator[tuple[list[int], int]]:
        tokenizer, length = mixture.tokenizer, mixture.length
        for text in itertools.cycle(texts):
            # Few tokens are longer than eight characters.
            ids = tokenizer.encode(text[: 8 * length], add_special_tokens=False)
            yield [tokenizer.bos_token_id, *ids, tokenizer.eos_token_id][:length], 1

    documents = {part.name: drawn(part) for part in mixture.parts}
    documents["stories"] = prose(assets.stories("valid"))
    documents["text"] = prose(assets.books("validation"))
    return {name: [rows(each, count, mixture.length)] for name, each in documents.items()}


def rows(documents: Iterable[tuple[list[int], int]], count: int, length: int) -> Batch:
    """Returns a row for each of the first documents (ids, how many do not count) that fit.

    Raises:
      DataError: of a thousand documents too few fit.
    """
    shape = (count, length)
    tokens, segments = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    counts = np.zeros(shape, bool)
    tried = itertools.islice(documents, 1000 + count)
    fitting = list(itertools.islice((x for x in tried if len(x[0]) <= length), count))
    if len(fitting) < count:
        raise dms_jax.DataError(f"documents are longer than {length} tokens")
    for row, (ids, silent) in enumerate(fitting):
        tokens[row, : len(ids)] = ids
        segments[row, : len(ids)] = 1
        counts[row, silent : len(ids)] = True
    return {"tokens": tokens, "segment_ids": segments, "loss_mask": counts}


def summarise(model: dms_jax.LanguageModel, records: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns losses and speed of the training, from the records of its steps."""
    steady = records[len(records) // 10 :]
    losses = [record["lm_loss"] for record in records[-100:] if not record["skipped"]]
    return {
        "held_out_loss": records[-1]["evaluation"],
        "training_loss": statistics.fmean(losses),
        "steps": len(records),
        "tokens": sum(record["tokens"] for record in records),
        "parameters": sum(x.size for x in jax.tree.leaves(model.transformer)),
        "tokens_per_second": statistics.median(x["tokens_per_second"] for x in steady),
        "share_of_time_waiting_for_data": sum(x["data_seconds"] for x in steady)
        / sum(x["seconds"] for x in steady),
    }


def draw(records: list[dict[str, Any]], path: pathlib.Path) -> None:
    """Draws the loss of training and of each held-out part against tokens."""
    from matplotlib.figure import Figure

    tokens = np.cumsum([record["tokens"] for record in records]) / 1e6
    known = [(t, r["lm_loss"]) for t, r in zip(tokens, records, strict=True) if not r["skipped"]]
    window = max(1, len(known) // 200)
    smooth = np.convolve([x for _, x in known], np.ones(window) / window, mode="valid")
    measured = [
        (t, r["evaluation"]) for t, r in zip(tokens, records, strict=True) if "evaluation" in r
    ]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    ends = [t for t, _ in known[window - 1 :]]
    axes.plot(ends, smooth, color="0.7", linewidth=1, label="training, all parts")
    for name, last in measured[-1][1].items():
        losses = [math.nan if each[name] is None else each[name] for _, each in measured]
        label = name if last is None else f"{name}  {last:.2g}"
        axes.plot([t for t, _ in measured], losses, marker=".", linewidth=1.2, label=label)
    axes.set(xlabel="million tokens", ylabel="held-out loss, nats a token", yscale="log")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    again = "Interrupted. Run the same command to go on."
    sys.exit(run(main, Config, description=__doc__, interrupted=again))
