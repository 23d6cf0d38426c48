"""Budgets at which a method holds as much as the reference retrofit was measured to hold."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import dms_jax
from dms_jax.command_line.self_taught.measuring import whole
from dms_jax.data import Exchange
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import KVpop, KVzap, Policy
from experiments.reproduction.files import read_json
from experiments.reproduction.real.plan import Job, Paths, free
from experiments.reproduction.real.systems import CHOICES, VANILLA, Free

_ROWS = 8  # answers of a batch that a threshold is taken from
_MOST_TRIES = 10  # thresholds that are asked with
_NEAR = 0.02  # share by which two peaks may differ that count as equal
_STEP = 1.5  # of a threshold, for a peak e times as large as the wanted one


def calibrated(paths: Paths, job: Job, method: Free) -> Policy:
    """The policy of a method at the budget for a measure.

    Questions that are answered by likelihood get a share of their length each, so that peaks are
    equal on average; all else has one budget in tokens.
    """
    assert method.make is not None
    vanilla = read_json(paths.result(free(job.model, VANILLA, job.measure)))
    reference = read_json(paths.reference(job.model, job.measure, job.setting))
    if job.measure == CHOICES:  # questions of very different lengths
        ratio = _peak(vanilla) / _peak(reference) / method.times
        return method.make(compression_ratio=max(ratio, 1.0))
    budget = _peak(reference)
    if method.equal == "mean":
        lengths = vanilla["per_problem"]
        prompts, answers = (np.asarray(lengths[n]) for n in ("prompt_tokens", "new_tokens"))
        budget = budget_of_mean(prompts, answers, reference["mean_live"])
    return method.make(budget=max(round(method.times * budget), 16))


def fitted(
    paths: Paths, job: Job, model: LanguageModel, policy: Policy, held_out: Sequence[Exchange]
) -> Policy:
    """The policy of a scorer of importance at the budget for a measure; `matched` goes on from it.

    Args:
      paths: where the figures are of what it is to hold as much as.
      job: what asks it.
      model: with the scorer.
      policy: as it was trained.
      held_out: answers that nothing was trained on, from which a threshold is taken.
    """
    vanilla = _peak(read_json(paths.result(free(job.model, VANILLA, job.measure))))
    peak = _peak(read_json(paths.reference(job.model, job.measure, job.setting)))
    if isinstance(policy, KVpop):
        if job.measure == CHOICES:
            return dataclasses.replace(policy, compression_ratio=max(vanilla / peak, 1.0))
        # One more is live while a query attends.
        return dataclasses.replace(policy, budget=max(round(peak) - 1, policy.least_budget))
    assert isinstance(policy, KVzap)
    ratio = (vanilla - policy.always_kept) / max(peak - policy.always_kept, 1.0)
    rows = [whole(each) for each in held_out]
    longest = max(map(len, rows))
    batches = []
    for first in range(0, len(rows), _ROWS):
        tokens = np.zeros((_ROWS, longest), np.int32)
        segments = np.zeros((_ROWS, longest), np.int32)
        for place, row in enumerate(rows[first : first + _ROWS]):
            tokens[place, : len(row)], segments[place, : len(row)] = row, 1
        batches.append({"tokens": tokens, "segment_ids": segments})
    return dms_jax.calibrate(model, batches, compression_ratio=max(ratio, 1.0), policy=policy)


def _peak(figures: dict[str, Any]) -> float:
    """Most live tokens of a sequence; a problem has those of all its chains."""
    return figures["peak"] / figures.get("chains", 1)


@dataclasses.dataclass(frozen=True)
class Match:
    """What was found at a threshold at which the peak is the wanted one.

    Attributes:
      policy: with the threshold.
      found: the figures of it.
      tries: thresholds that were asked with, the last one among them, and the peaks they gave.
    """

    policy: KVzap
    found: dict[str, Any]
    tries: tuple[tuple[float, float], ...]


def matched(ask: Callable[[KVzap], dict[str, Any]], policy: KVzap, peak: float) -> Match:
    """Moves a threshold until what is measured holds as many tokens as something else did.

    A threshold from texts that the whole model wrote does not say what is held by a model that
    evicts: its hidden states are others, and so are its answers and their lengths. Scores decide
    nothing here.

    Args:
      ask: figures of a policy in use, among them `peak`.
      policy: where to begin.
      peak: tokens to hold, within 2 percent.

    Raises:
      DataError: no threshold of ten gave that peak.
    """
    threshold, tries = policy.threshold, []
    more = fewer = None  # thresholds that hold too many and too few, the nearest, with their gaps
    for number in range(_MOST_TRIES):
        asked = dataclasses.replace(policy, threshold=threshold)
        found = ask(asked)
        tries.append((threshold, found["peak"]))
        gap = math.log(found["peak"] / peak)
        if abs(found["peak"] / peak - 1) <= _NEAR:
            return Match(asked, found, tuple(tries))
        if gap > 0:
            more = (threshold, gap)
        else:
            fewer = (threshold, gap)
        if more is None or fewer is None:
            threshold += _STEP * gap * 2**number
        else:  # a line between them, but never so near to an end that nothing is learned
            part = min(max(more[1] / (more[1] - fewer[1]), 0.15), 0.85)
            threshold = more[0] + part * (fewer[0] - more[0])
    raise dms_jax.DataError(
        f"No threshold of KVzap gave a peak of {peak:.1f} tokens: "
        + ", ".join(f"{peak:.1f} at {threshold:.3f}" for threshold, peak in tries)
    )


def budget_of_mean(prompts: np.ndarray, answers: np.ndarray, live: float) -> int:
    """The budget at which rows of these lengths hold so many tokens in the mean of all steps.

    # prompts: [2], answers: [5] (steps at 3, 4, 5, 6 tokens), live: 3.75  Out: 4
    """
    steps = np.maximum(answers - 1, 0)
    within = np.arange(1, steps.max() + 1)
    rows = np.where(within <= steps[:, None], prompts[:, None] + within, 0)
    for budget in range(1, int(rows.max()) + 1):
        if np.minimum(rows, budget).sum() / steps.sum() >= live:
            return budget
    return int(rows.max())
