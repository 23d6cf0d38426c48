"""What systems are called on the page."""

from typing import Any

from dms_jax import DMS, KVpop, KVzap
from experiments.reproduction.real.results import Results
from experiments.reproduction.real.systems import TRAININGS, VANILLA

_KINDS = {"all": "all weights", "low_rank": "low rank", "adapter": "adapter"}
_FREE_LABELS = {
    VANILLA: "vanilla",
    "tova": "TOVA",
    "expected": "ExpectedAttention",
    "snapkv": "SnapKV",
    "streaming": "StreamingLLM",
    "h2o": "H2O",
    "quest": "Quest",
    "kcache": "KCache",
    "vanilla-float8": "vanilla, float8",
    "dms-float8": "DMS of the verdict, float8",
    "tova-mean": "TOVA, equal mean",
    "expected-mean": "ExpectedAttention, equal mean",
    "streaming-mean": "StreamingLLM, equal mean",
    "tova-half-more": "TOVA, 1.5 times the budget",
    "expected-half-more": "ExpectedAttention, 1.5 times the budget",
}


def shown(results: Results, label: str, record: dict[str, Any]) -> str:
    """A system in words; with the run, where another than the verdicts' measured it."""
    return name_of(label) + (f" (run {record['run']})" if record["run"] != results.main else "")


def name_of(label: str) -> str:
    """A system in words.

    # In: "low-rank-w16-at3.5"  Out: "DMS, low rank, window 16, to 3.5"     "tova"  "TOVA"
    """
    system, _, setting = label.partition("-at")
    if system not in TRAININGS:
        return _FREE_LABELS[system] + (f", as much as DMS at {setting}" if setting else "")
    training = TRAININGS[system]
    if training.policy is None:
        return "trained further (the control)"
    words = [training.policy.name, _KINDS[training.trainable]]
    if isinstance(training.policy, KVpop | KVzap):
        words[1:] = [f"window {training.policy.window}"]
    words += [f"window {training.policy.window}"] if isinstance(training.policy, DMS) else []
    if training.evicts_as_trained:
        words += [f"at {setting}" if float(setting) in training.snapshots else f"to {setting}"]
    elif float(setting) in training.budgets:
        words += [f"as much as DMS at {setting}"]
    words += [training.words] if training.words else []
    if training.share != 1 and not training.of_sweep:  # a sweep's is said of all of it
        words += [f"{training.share:g} {'of' if training.share < 1 else 'times'} the tokens"]
    return ", ".join(words)
