"""Milliseconds a decode step of a real model under every method, on one card in one run."""

import json
import pathlib
from collections.abc import Callable
from typing import Any

from dms_jax import LanguageModel
from dms_jax.command_line.comparison.measure import FAILURES
from experiments.benchmarks.decode_steps import read_rate
from experiments.benchmarks.policy_steps import racers, time_steps
from experiments.reproduction.files import write_text
from experiments.reproduction.real.settings import Config

RATIO = 4
METHODS = (
    "Vanilla",
    "Vanilla + float8",
    "DMS (drawn)",
    "DMS (drawn) + float8",
    "StreamingLLM",
    "TOVA",
    "H2O",
    "KVzap",
    "KVpop",
    "Quest",
    "SnapKV",
    "ExpectedAttention",
    "DMC",
    "KCache",
)


def time_methods(
    config: Config, model: LanguageModel, check_time: Callable[[], None], kept: pathlib.Path
) -> list[dict[str, Any]]:
    """Times every method with a budget of a quarter of the context.

    Keys and values are random, and DMS is played by draws with uneven heads; see
    `benchmarks.policy_steps`. A file keeps each row for a call that goes on.
    """
    rows: list[dict[str, Any]] = []
    if kept.exists():
        rows = [json.loads(line) for line in kept.read_text().splitlines()]
    rate = read_rate()
    known = {racer.label: racer for racer in racers(config.speed_context, RATIO)}
    for label in METHODS[len(rows) :]:
        check_time()
        try:
            sizes = dict(batch=config.speed_batch, context=config.speed_context)
            figures = time_steps(model, known[label], **sizes, rate=rate)
        except FAILURES as error:
            figures = {"failed": str(error)[:400]}
        rows.append({"method": label, **figures})
        write_text(kept, "".join(json.dumps(row) + "\n" for row in rows))
    return rows
