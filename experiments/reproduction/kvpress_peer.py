"""Compares the tokens that kvpress and dms_jax keep, with equal prompts and weights.

The weights are written in float32 as a Hugging Face directory that both sides read, and the prompts
are RULER's, all of one length. kvpress (0.5.5) needs transformers < 5.3, so it runs with the
interpreter of a separate environment (`kvpress_side`):

    uv venv peer && uv pip install -p peer/bin/python "kvpress==0.5.5" "transformers<5.3" torch
    python -m experiments.reproduction.kvpress_peer --model qwen2.5-coder-0.5b-instruct.gguf \
        --kvpress peer/bin/python

Each layer is cut to a share of the prompt at its end. The script compares the kept positions of
every layer and KV head, the scores, and greedy answers from the kept tokens, if neither side evicts
during the answer. Writes data.json and prints the table of `experiments/results/kvpress`; files
exchanged between the sides are in --work.
"""

import dataclasses
import functools
import json
import math
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Float

import dms_jax
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.evaluation import Chat
from dms_jax.evaluation.prompting import encode_problem, fit_task
from dms_jax.evaluation.tasks import RULER
from dms_jax.evaluation.tasks.ruler import RulerName
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import (
    H2O,
    TOVA,
    AdaKV,
    ExpectedAttention,
    KeyDiff,
    Knorm,
    Policy,
    SnapKV,
    StreamingLLM,
)

ROOT = pathlib.Path(__file__).resolve().parents[2]
SIDE = """
import pathlib, sys
from experiments.reproduction import kvpress_side
kvpress_side.main(pathlib.Path(sys.argv[1]))
"""
TRIES = 200  # problems of a task to search for the exact length

# Each policy as a function of the kept tokens, and of the tokens of the whole request.
POLICIES: dict[str, Callable[[int, int], Policy]] = {
    "SnapKV, window 32": lambda kept, _: SnapKV(budget=kept, window=32, interval=None),
    "SnapKV, window 64": lambda kept, _: SnapKV(budget=kept, window=64, interval=None),
    "AdaKV(SnapKV)": lambda kept, _: AdaKV(SnapKV(budget=kept, interval=None)),
    "ExpectedAttention": lambda kept, _: ExpectedAttention(budget=kept, interval=None),
    "AdaKV(ExpectedAttention)": lambda kept, _: AdaKV(
        ExpectedAttention(budget=kept, epsilon=1e-2, interval=None)
    ),
    "Knorm": lambda kept, _: Knorm(budget=kept, interval=None),
    "KeyDiff": lambda kept, _: KeyDiff(budget=kept, interval=None),
    "TOVA": lambda kept, _: TOVA(budget=kept),
    # Its prompts are dense only with a compression ratio.
    "StreamingLLM": lambda kept, tokens: StreamingLLM(compression_ratio=tokens / kept),
    "H2O": lambda kept, _: H2O(budget=kept),
}
# After the prompt these evict a token for each new one; presses do not.
BY_TOKEN = ("TOVA", "StreamingLLM", "H2O")


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare the tokens that kvpress and dms_jax keep."""

    model: str
    """Model with a tokenizer and a chat template: GGUF file, Hugging Face directory or hub id."""
    kvpress: pathlib.Path | None = None
    """Python of the environment with kvpress. Unless given, its results of an earlier call are read
    from --work."""
    tasks: tuple[RulerName, ...] = ("niah_multikey_1", "niah_multivalue", "fwe")
    """RULER's tasks, one prompt of each."""
    tokens: int = 512
    """Tokens of each prompt."""
    ratios: tuple[float, ...] = (0.5, 0.75)
    """Removed shares of a prompt; answers use the first one."""
    new_tokens: int = 32
    """Most tokens of each answer."""
    work: pathlib.Path = pathlib.Path("runs/kvpress")
    """Folder for the weights, the prompts and the results of each side."""
    out: pathlib.Path = pathlib.Path("runs/kvpress/compared")
    """Folder for data.json."""

    def kept(self, ratio: float) -> int:
        """Returns the tokens that a row keeps, as kvpress rounds them."""
        return int(self.tokens * (1 - ratio))


@dataclasses.dataclass(frozen=True)
class Side:
    """The tokens that one side kept.

    Attributes:
      kept: mask of the positions by policy and ratio, as in "Knorm/0.5".
      scores: the score of every position, likewise; inf for protected positions.
      answers: greedy answers by policy.
    """

    kept: dict[str, Bool[np.ndarray, "L B K T"]]
    scores: dict[str, Float[np.ndarray, "L B K T"]]
    answers: dict[str, list[list[int]]]


def main(config: Config) -> None:
    """Runs both sides, writes the figures and prints the table."""
    make_folder("--out", config.out)
    make_folder("--work", config.work)
    model = dms_jax.load(config.model, dtype="float32")
    texts = prompts(model, config)
    if config.kvpress is not None:
        dms_jax.save(model, "Vanilla", config.work / "model")
        asked = {
            "texts": texts,
            "ratios": config.ratios,
            "new_tokens": config.new_tokens,
            "end": model.generation.eos_token_ids,
            "answered": [name for name in POLICIES if name not in BY_TOKEN],
        }
        write_json(config.work / "texts.json", asked)
        run_side(config.kvpress, config.work)
    ours = ours_of(model, texts, config)
    theirs, versions = peers(config)
    figures = {
        f"{name}/{ratio:g}": figures_of(name, config.kept(ratio), f"{name}/{ratio:g}", ours, theirs)
        for name in POLICIES
        for ratio in config.ratios
    }
    answers = {
        name: [[ours.answers[name][n], theirs.answers[name][n]] for n in range(len(texts))]
        for name in ours.answers
    }
    report = {"versions of kvpress's side": versions, "policies": figures, "answers": answers}
    write_json(config.out / "data.json", provenance(config) | report)
    show(config, figures, answers)


def run_side(python: pathlib.Path, work: pathlib.Path) -> None:
    """Runs kvpress's side in its own environment.

    Raises:
      ConfigError: it cannot be started, or failed.
    """
    command = [python.absolute(), "-c", SIDE, work.absolute()]
    try:
        failed = subprocess.run(command, cwd=ROOT, check=False).returncode
    except OSError as error:
        raise dms_jax.ConfigError(f"--kvpress {python}: {error.strerror}.") from error
    if failed:
        raise dms_jax.ConfigError(f"--kvpress {python}: it failed, as it said above.")


def prompts(model: LanguageModel, config: Config) -> list[list[int]]:
    """Returns the first prompt of each task that has exactly the length.

    Raises:
      DataError: there is none.
    """
    found = []
    for name in config.tasks:
        probe = fit_task(model, RULER(name), Chat())
        longest = getattr(probe.problem("test", 0), "answer_tokens", 0)
        task = fit_task(model, RULER(name, length=config.tokens + longest), Chat())
        for number in range(TRIES):
            text = encode_problem(model, task.problem("test", number), Chat(), name=name)
            if len(text) == config.tokens:
                found.append(text)
                break
        else:
            raise dms_jax.DataError(
                f"none of {TRIES} problems of {name} has a prompt of {config.tokens} tokens; give "
                "another number, or another task."
            )
    return found


# -- our side --------------------------------------------------------------------------------------

_cuts: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # layer -> scores, mask of kept tokens


def _note(layer: Any, scores: Any, keep: Any) -> None:
    _cuts[int(layer)] = np.asarray(scores), np.asarray(keep)


@functools.cache
def _noting(policy: type[Any]) -> type[Any]:
    """Returns the class of a policy that records the scores and the mask of every cut.

    A prompt is appended, so before it is cut the slot of a token is its position.
    """
    traced: list[jax.Array] = []

    class Noting(policy):
        def scores(self, *given: Any) -> jax.Array:
            traced.append(super().scores(*given))
            return traced[-1]

        def survivors(self, state: Any, chunk: Any, rows: Any, q: Any) -> jax.Array:
            traced.clear()
            keep = super().survivors(state, chunk, rows, q)
            # StreamingLLM has no scores.
            scores = traced[-1] if traced else keep
            jax.debug.callback(_note, chunk.tokens.layer, scores, keep)
            return keep

    return Noting


def ours_of(model: LanguageModel, texts: list[list[int]], config: Config) -> Side:
    """Reads the prompts under every policy, and answers them from the kept tokens."""
    side = Side({}, {}, {})
    for name, make in POLICIES.items():
        for ratio in config.ratios:
            answered = ratio == config.ratios[0] and name not in BY_TOKEN
            # Two tokens are requested, so that the prompt is cut before the answer ends.
            new = config.new_tokens if answered else 2
            policy = make(config.kept(ratio), config.tokens + new)
            fields = {each.name: getattr(policy, each.name) for each in dataclasses.fields(policy)}
            _cuts.clear()
            done = dms_jax.generate(
                model,
                texts,
                policy=_noting(type(policy))(**fields),
                sampling=dms_jax.Sampling(temperature=0, max_new_tokens=new),
            )
            jax.effects_barrier()
            layers = [_cuts[layer] for layer in range(model.config.num_layers)]
            place = f"{name}/{ratio:g}"
            side.scores[place], side.kept[place] = (
                np.stack(each)[..., : config.tokens] for each in zip(*layers, strict=True)
            )
            if answered:
                end = set(model.generation.eos_token_ids)
                side.answers[name] = [
                    [token for token in each.tokens if token not in end]
                    for each in done.completions
                ]
            print(f"dms_jax: {place}", flush=True)
    return side


# -- both ------------------------------------------------------------------------------------------


def peers(config: Config) -> tuple[Side, dict[str, str]]:
    """Returns kvpress's kept tokens, and its versions.

    Raises:
      DataError: it has not run.
    """
    try:
        said = json.loads((config.work / "peer.json").read_text(encoding="utf-8"))
        arrays = dict(np.load(config.work / "peer.npz"))
    except OSError as error:
        raise dms_jax.DataError(
            f"{error.filename}: {error.strerror}: give --kvpress, so that kvpress runs."
        ) from error
    kinds = {
        kind: {
            name.removeprefix(f"{kind}/"): array
            for name, array in arrays.items()
            if name.startswith(f"{kind}/")
        }
        for kind in ("kept", "scores")
    }
    return Side(**kinds, answers=said["answers"]), said["versions"]


def figures_of(name: str, budget: int, place: str, ours: Side, theirs: Side) -> dict[str, Any]:
    """Returns the agreement of both sides on one policy at one ratio.

    `same`: share of the positions that kvpress keeps that dms_jax keeps too. `rows`: share of the
    rows (a KV head of a layer in a prompt) that are equal to the last position. `furthest`: the
    largest relative distance of kvpress's score at a differing position from its highest dropped
    score. `scores`: the largest and the median relative difference of scores at positions that
    neither side protects.
    """
    mine, score = ours.kept[place], ours.scores[place]
    kept, want = theirs.kept[place], theirs.scores[place]
    pooled = name.startswith("AdaKV")
    found: dict[str, Any] = {"budget": budget} | agreement(mine, kept, want, pooled=pooled)
    if name == "StreamingLLM":
        return found
    protected = np.isinf(score) | (want == want.max((1, 2, 3), keepdims=True))
    if name == "H2O":  # a sum over queries; the press takes the mean over queries that see a key
        want = want * np.arange(want.shape[-1], 0, -1)
    if name in RULES:
        by_rule = RULES[name](want, budget)
        found["by its rule"] = agreement(mine, by_rule, want, pooled=False)
    error = np.abs(score - want)[~protected] / np.abs(want)[~protected]
    return found | {"scores": [float(error.max()), float(np.median(error))]}


def agreement(
    mine: Bool[np.ndarray, "L B K T"],
    kept: Bool[np.ndarray, "L B K T"],
    scores: Float[np.ndarray, "L B K T"],
    *,
    pooled: bool,
) -> dict[str, float]:
    """Returns `same`, `rows` and `furthest` of `figures_of`.

    Args:
      mine: mask of dms_jax.
      kept: mask of kvpress.
      scores: kvpress's scores.
      pooled: whether the heads of a layer compete.
    """
    axes = (2, 3) if pooled else (3,)
    edge = np.where(kept, -np.inf, scores).max(axes, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):  # StreamingLLM's are 0 and 1
        distance = np.abs(scores - edge) / np.abs(edge)
    differ = mine != kept
    return {
        "same": float((mine & kept).sum() / kept.sum()),
        "rows": float((~differ.any(-1)).mean()),
        "furthest": float(np.where(differ, distance, 0).max()),
    }


def h2o(sums: Float[np.ndarray, "L B K T"], budget: int) -> Bool[np.ndarray, "L B K T"]:
    """Returns H2O's tokens: the larger half by recency, the rest by sums of weights."""
    sums = np.array(sums)
    sums[..., sums.shape[-1] - (budget - budget // 2) :] = np.inf
    return _latest_of_the_highest(sums, budget)


def knorm(scores: Float[np.ndarray, "L B K T"], budget: int) -> Bool[np.ndarray, "L B K T"]:
    """Returns Knorm's tokens, for norms with 12 bits after the first."""
    mantissa, exponent = np.frexp(scores.astype(np.float64))  # of 0.5 to 1
    return _latest_of_the_highest(np.ldexp(np.round(mantissa * 2**13), exponent - 13), budget)


def _latest_of_the_highest(scores: np.ndarray, budget: int) -> np.ndarray:
    rank = np.argsort(np.argsort(scores, -1, kind="stable"), -1)
    return rank >= scores.shape[-1] - budget


RULES = {"H2O": h2o, "Knorm": knorm}


def show(
    config: Config,
    figures: dict[str, dict[str, Any]],
    answers: dict[str, list[list[list[int]]]],
) -> None:
    """Prints the figures as a Markdown table."""
    print("| policy | removed | same positions | equal rows | furthest | scores | answers |")
    print("|---" + "|---:" * 6 + "|")
    for place, found in figures.items():
        name, ratio = place.split("/")
        largest, median = found.get("scores", (math.nan, math.nan))
        pairs = answers.get(name, []) if float(ratio) == config.ratios[0] else []
        equal = sum(mine == theirs for mine, theirs in pairs)
        rows = {name: found, f"{name}, its rule": found.get("by its rule")}
        for label, row in rows.items():
            if row is not None:
                print(
                    f"| {label} | {ratio} | {row['same']:.3%} | {row['rows']:.1%} "
                    f"| {row['furthest']:.0e} | {largest:.0e}, {median:.0e} "
                    f"| {equal} of {len(pairs)} |"
                )


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
