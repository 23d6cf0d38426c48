"""Milliseconds a decode step of a real model under every method, on one card in one run."""

from collections.abc import Callable
from typing import Any

from dms_jax import LanguageModel
from dms_jax.command_line.comparison.measure import FAILURES
from experiments.benchmarks.decode_steps import read_rate
from experiments.benchmarks.policy_steps import racers, time_steps
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
    "Quest",
    "SnapKV",
    "ExpectedAttention",
    "DMC",
    "KCache",
)


def time_methods(
    config: Config, model: LanguageModel, check_time: Callable[[], None]
) -> list[dict[str, Any]]:
    """Times every method with a budget of a quarter of the context.

    Keys and values are random, and DMS is played by draws with uneven heads; see
    `benchmarks.policy_steps`.
    """
    rows: list[dict[str, Any]] = []
    rate = read_rate()
    known = {racer.label: racer for racer in racers(config.speed_context, RATIO)}
    for label in METHODS:
        check_time()
        try:
            sizes = dict(batch=config.speed_batch, context=config.speed_context)
            figures = time_steps(model, known[label], **sizes, rate=rate)
        except FAILURES as error:
            figures = {"failed": str(error)[:400]}
        rows.append({"method": label, **figures})
    return rows
