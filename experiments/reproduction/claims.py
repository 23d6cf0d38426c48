"""Recompute every number of the pages about evidence from the records, and draw their pictures.

    python -m experiments.reproduction.claims            # says which numbers differ; 1 if any does
    python -m experiments.reproduction.claims --write    # writes them, and the pictures

A number on a page carries its formula, in a comment that Markdown does not show:

    loses 1.8 ± 0.8<!--= lost 0.5b nine plain gsm8k --> points

    score RECORD SYSTEMS MEASURE           mean score, percent
    gap RECORD SYSTEMS SYSTEMS MEASURE     difference in points, paired by problem; `lost`: the same
                                           with the other sign; of several, a+b+c, the mean
    peak | reads | problems | trainings RECORD SYSTEMS MEASURE
    times RECORD SYSTEM SYSTEM MEASURE [peak | reads | cache_bytes]   how much more the second has
    gain RECORD SYSTEM SYSTEM reads|peak [MEASURE]   average gain of votes over the best decoding of
                                           the second; `worst`: the least sure one at a budget of
                                           more than 1.5 of its greedy chains
    sampled RECORD SYSTEM SYSTEM AXIS      the same with greedy points left out: what to distrust
    votes RECORD SYSTEM CHAINS [MEASURE]   score of the vote of so many chains ("9", or "9@0.7"
                                           where several temperatures were asked); greedy: 0 chains
    votes-gap RECORD SYSTEM CHAINS SYSTEM CHAINS [MEASURE], and likewise votes-reads (a ratio)
    json FILE KEY ... [/ FILE KEY ...] FORMAT    a value of another report, or the ratio of two; a
                                           number may stand for either
    verdict FORMULA > BOUND [and FORMULA > BOUND ...]

SYSTEMS is a system of the record, with its last training ("control"), one ("control:8") or all
("control:*"), or a group of the record ("nine"). Errors are one standard error over problems and
trainings. A verdict is "shown" where every difference is beyond its bound by two errors, "partly"
where some are, and where none is "contradicted" if one is short of its bound by two errors, else
"not shown". MEASURE "ruler-4k/vt" is one task of the nine that alternate.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from dms_jax.command_line.running import run
from dms_jax.errors import DataError
from dms_jax.evaluation import Hyperscaling, Measured, Point, difference, mean_over_seeds
from dms_jax.evaluation.bootstrap import Trial, measured_average_gain
from dms_jax.evaluation.pareto import Level, gain_at

ROOT = pathlib.Path(__file__).resolve().parents[2]
RESULTS = ROOT / "experiments" / "results"
RECORDS = {  # of each model
    "1.5b": "real_models/qwen2.5-coder-1.5b.json",  # written by `campaign`
    "0.5b": "real_models/qwen2.5-coder-0.5b.json",
    "135m": "real_models/smollm2-135m.json",
    "11m": "reasoner_11m/record.json",
}
PAGES = (
    "README.md",
    "experiments/results/CLAIMS.md",
    "experiments/results/real_models/README.md",
    "experiments/results/reasoner_11m/README.md",
    "experiments/results/serving/README.md",
    "experiments/results/speed/README.md",
    "experiments/docs/pages/policies.md",
    "experiments/docs/pages/retrofitting.md",
    "dms_jax/assets/smollm2-135m-instruct-dms/README.md",
    "dms_jax/assets/reasoner-11m-dms/README.md",
)
NINE = (  # RULER's tasks that need no file, but for its two easiest, in the order they are asked
    *("niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3"),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"),
)
TAGGED = re.compile(
    r"(?P<shown>\*\*[a-z ]+\*\*|[-+]?\d[\d,]*(?:\.\d+)?(?: ± (?:\d+(?:\.\d+)?|unknown))?)"
    r"<!--= (?P<formula>.+?) -->"
)


@dataclasses.dataclass(frozen=True)
class Config:
    """Recompute every number of the pages about evidence from the records."""

    write: bool = False
    """Write what differs, and the pictures."""


# -- records --------------------------------------------------------------------------------------


@functools.cache
def record(name: str) -> dict[str, Any]:
    """What was measured of a model: `rows` of one chain, and `votes`."""
    return json.loads((RESULTS / RECORDS[name]).read_text(encoding="utf-8"))


def rows(name: str, systems: str, measure: str) -> list[dict[str, Any]]:
    """The rows of a system or of a group of trainings.

    Raises:
      DataError: the record has none.
    """
    found = []
    for one in record(name).get("groups", {}).get(systems, [systems]):
        system, _, training = one.partition(":")
        own = [
            row
            for row in record(name)["rows"]
            if (row["system"], row["measure"]) == (system, measure.partition("/")[0])
            and training in ("", "*", str(row.get("run")))
        ]
        if not own:
            raise DataError(f"the record {name} has no {one} of {measure}.")
        own.sort(key=lambda row: row.get("run", 0))
        found += own if training == "*" else own[-1:]
    return found


def scores(
    name: str, systems: str, measure: str
) -> Float[np.ndarray, "trainings problems"] | Float[np.ndarray, "seeds 1"]:
    """Scores by problem; where a record holds only the mean of each seed, these."""
    found = []
    for row in rows(name, systems, measure):
        if "by_seed" in row:
            return np.asarray(row["by_seed"], np.float64)[:, None]
        found.append([float(score) for score in row["scores"]])
    _, _, task = measure.partition("/")
    own = np.asarray(found, np.float64)
    return own[:, NINE.index(task) :: len(NINE)] if task else own


def gap(name: str, left: str, right: str, measure: str) -> Measured:
    """Difference of two systems, paired by problem where scores by problem are known."""
    parts = []
    for each in measure.split("+"):
        one, other = scores(name, left, each), scores(name, right, each)
        if min(one.shape[1], other.shape[1]) > 1:
            parts.append(difference(one, other))
        else:
            spread = math.hypot(*(_error_of_seeds(x.mean(1)) for x in (one, other)))
            parts.append(Measured(float(one.mean() - other.mean()), spread))
    error = math.sqrt(sum(part.error**2 for part in parts)) / len(parts)
    return Measured(float(np.mean([part.value for part in parts])), error)


def _error_of_seeds(means: Float[np.ndarray, " seeds"]) -> float:
    return float(means.std(ddof=1) / math.sqrt(len(means))) if len(means) > 1 else math.nan


def points(name: str, systems: Sequence[str], measure: str = "gsm8k") -> Hyperscaling:
    """The votes of systems on one task, each "control", "control:8" or all of its trainings.

    Where systems have other numbers of trainings, a single one stands for as many as the others.
    """
    found = []
    for one in systems:
        system, _, training = one.partition(":")
        own = [
            each
            for each in record(name)["votes"]
            if (each["system"], each.get("measure", "gsm8k")) == (system, measure)
            and training in ("", "*", str(each["run"]))
        ]
        runs = sorted({each["run"] for each in own}) if training == "*" else [own[-1]["run"]]
        settings = {(each["length"], each["temperature"]): each for each in own}
        for (length, temperature), first in settings.items():
            same = [
                each
                for run_ in runs
                for each in own
                if (each["run"], each["length"], each["temperature"]) == (run_, length, temperature)
            ]
            for chains in map(int, first["scores"]):
                found.append(
                    Point(
                        system=one,
                        compression_ratio=None,
                        length=length,
                        chains=chains,
                        temperature=temperature,
                        policy=first["policy"],
                        scores={"vote": np.stack([_votes(each, chains) for each in same])},
                        reads=np.stack([_spent(each, "reads", chains) for each in same]),
                        peak=np.stack([_spent(each, "peak", chains) for each in same]),
                        new_tokens=float(first["new_tokens"]),
                        ended=float(first["ended"]),
                    )
                )
    most = max(len(point.reads) for point in found)
    return Hyperscaling({}, tuple(_repeated(point, most) for point in found))


def _repeated(point: Point, trainings: int) -> Point:
    if len(point.reads) in (1, trainings):
        wide = functools.partial(np.repeat, repeats=trainings // len(point.reads), axis=0)
        return dataclasses.replace(
            point,
            scores={name: wide(x) for name, x in point.scores.items()},
            reads=wide(point.reads),
            peak=wide(point.peak),
        )
    raise DataError(f"{point.system} has {len(point.reads)} trainings, and others {trainings}.")


def _votes(row: dict[str, Any], chains: int) -> Float[np.ndarray, " problems"]:
    """A digit of base 36 a problem: in how many of the disjoint groups the vote was right."""
    own, groups = row["scores"][str(chains)], row["chains"] // chains
    return np.asarray([int(digit, 36) for digit in own], np.float64) / groups


def _spent(row: dict[str, Any], axis: str, chains: int) -> Float[np.ndarray, " problems"]:
    """Tokens of so many chains of each problem; of greedy ones some records have the mean alone."""
    own = np.broadcast_to(
        np.asarray(row[axis], np.float64), (len(next(iter(row["scores"].values()))),)
    )
    return own * chains


# -- formulas -------------------------------------------------------------------------------------


def _gain(name: str, left: str, right: str, axis: Any, *measure: str) -> Measured:
    found = points(name, (right, left), *measure).average_gain(left, right, axis)
    if found is None:
        raise DataError(f"{left} and {right} of {name} share no budget, or lack a greedy point.")
    return found


def _worst(name: str, left: str, right: str, axis: Any, *measure: str) -> Measured:
    """The least sure gain at a budget of `left` above 1.5 greedy chains of `right`.

    Each system does the best that it does with no more than that; the second one is interpolated.
    """
    whole = points(name, (right, left), *measure)
    least = 1.5 * max(point.budget(axis) for point in whole.of(right) if point.greedy)
    own, other = (whole.frontier(each, axis) for each in (left, right))
    levels = [point.level(axis, "vote") for point in other]
    gains = []
    for budget in {point.budget(axis) for point in whole.of(left)}:
        if budget >= least:
            best = [point for point in own if point.budget(axis) <= budget][-1]
            beyond = [Level(budget, levels[-1].scores)] if budget > levels[-1].budget else []
            gain = gain_at(Level(budget, best.scores["vote"]), [*levels, *beyond])
            gains += [] if gain is None else [gain]
    if not gains:
        raise DataError(f"{left} and {right} of {name} share no budget of 1.5 greedy chains.")
    return min(gains, key=lambda gain: gain.value - 2 * gain.error)


def _sampled(name: str, left: str, right: str, axis: str, *measure: str) -> Measured:
    whole = points(name, (right, left), *measure)
    trials = [
        [
            Trial(getattr(point, axis), point.scores["vote"])
            for point in whole.of(system)
            if not point.greedy
        ]
        for system in (left, right)
    ]
    found = measured_average_gain(*trials)
    assert found is not None
    return found


def _point(name: str, system: str, chains: str, *measure: str) -> Point:
    """The point of the longest answers."""
    whole = points(name, (system,), *measure).points
    count, _, temperature = chains.partition("@")
    found = [
        point
        for point in whole
        if point.length == max(each.length for each in whole)
        and (point.greedy if count == "0" else not point.greedy and point.chains == int(count))
        and temperature in ("", f"{point.temperature:g}")
    ]
    if len(found) != 1:
        there = ", ".join(point.label for point in found or whole)
        raise DataError(f"votes of {chains} chains of {system} are one of {there}: which?")
    return found[0]


def _two_points(
    name: str, left: str, chains: str, right: str, others: str, *measure: str
) -> tuple[Point, Point]:
    return _point(name, left, chains, *measure), _point(name, right, others, *measure)


def _votes_gap(*words: str) -> Measured:
    one, other = _two_points(*words)
    return difference(one.scores["vote"], other.scores["vote"])


def _votes_reads(*words: str) -> float:
    one, other = _two_points(*words)
    return one.budget("reads") / other.budget("reads")


def _times(name: str, one: str, other: str, measure: str, what: str = "peak") -> float:
    left, right = (np.mean([row[what] for row in rows(name, x, measure)]) for x in (one, other))
    return float(right / left)


def _negative(value: Measured) -> Measured:
    return Measured(-value.value, value.error)


def _json(*words: str) -> str:
    *paths, form = words
    parts = " ".join(paths).split(" / ")
    values = []
    for part in parts:
        file, *keys = part.split(" ")
        value: Any = json.loads((RESULTS / file).read_text(encoding="utf-8")) if keys else file
        for key in keys:
            value = value[int(key)] if isinstance(value, list) else value[key]
        values.append(float(value))
    value = values[0] / values[1] if len(values) == 2 else values[0]
    return format(value, form)


def _mean(*words: str) -> float:
    *which, what = words
    return float(np.mean([row[what] for row in rows(*which)]))


MEASURED: dict[str, Callable[..., Measured]] = {
    "gap": gap,
    "lost": lambda *words: _negative(gap(*words)),
    "gain": _gain,
    "worst": _worst,
    "sampled": _sampled,
    "votes-gap": _votes_gap,
}
PLAIN: dict[str, Callable[..., str]] = {
    "score": lambda *words: f"{100 * scores(*words).mean():.1f}",
    "score-error": lambda *words: _percent(mean_over_seeds(scores(*words)), sign=""),
    "votes": lambda *words: f"{100 * _point(*words).accuracy().value:.1f}",
    "votes-reads": lambda *words: f"{_votes_reads(*words):.1f}",
    "peak": lambda *words: f"{_mean(*words, 'peak'):,.0f}",
    "reads": lambda *words: f"{_mean(*words, 'reads'):,.0f}",
    "problems": lambda *words: f"{rows(*words)[-1]['problems']:,}",
    "trainings": lambda *words: str(len(scores(*words))),
    "tokens": lambda *words: f"{_mean(*words, 'million_tokens'):.0f}",
    "times": lambda *words: f"{_times(*words):.1f}",
    "nats": lambda *words: _nats(*words),
    "json": _json,
}


def _nats(name: str, left: str, right: str, measure: str) -> str:
    one, other = (
        np.asarray([row["nats"] for row in rows(name, x, measure)]) for x in (left, right)
    )
    found = difference(one, other)
    return f"{found.value:+.3f} ± {found.error:.3f}"


def _percent(value: Measured, sign: str) -> str:
    error = "unknown" if math.isnan(value.error) else f"{100 * value.error:.1f}"
    return f"{100 * value.value:{sign}.1f} ± {error}"


def computed(formula: str) -> str:
    """What stands on a page for a formula.

    Raises:
      DataError: the formula is none, or the records do not have what it asks for.
    """
    word, *rest = formula.split()
    try:
        if word == "verdict":
            return f"**{verdict(' '.join(rest))}**"
        if word in MEASURED:
            return _percent(MEASURED[word](*rest), sign="" if word == "lost" else "+")
        return PLAIN[word](*rest)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise DataError(f"<!--= {formula} -->: {type(error).__name__}: {error}") from error


def verdict(text: str) -> str:
    """What differences say of a claim that each is above its bound, in points; see the module."""
    found = []
    for part in text.split(" and "):
        formula, bound = part.rsplit(" > ", 1)
        word, *rest = formula.split()
        value, least = MEASURED[word](*rest), float(bound) / 100
        if value.beyond(least):
            found.append("shown")
        else:
            short = _negative(value).beyond(-least)
            found.append("contradicted" if short else "not shown")
    if "shown" in found:
        return "shown" if set(found) == {"shown"} else "partly"
    return "contradicted" if "contradicted" in found else "not shown"


def recomputed(text: str) -> str:
    """A page with every number that carries a formula as the records have it."""
    return TAGGED.sub(
        lambda found: f"{computed(found['formula'])}<!--= {found['formula']} -->", text
    )


def formulas(text: str) -> int:
    """How many numbers of a page carry a formula.

    Raises:
      DataError: a comment stands behind something else than a number or a verdict.
    """
    count = len(TAGGED.findall(text))
    if count != text.count("<!--= "):
        raise DataError(f"{text.count('<!--= ') - count} formulas stand behind no number.")
    return count


# -- pictures -------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Picture:
    """A picture of what a record has, drawn as soon as the record has enough to compare.

    Attributes:
      record: its name.
      draw: draws it into a file, from the record of a name.
      enough: whether the record of a name has what the picture compares.
    """

    record: str
    draw: Callable[[pathlib.Path, str], None]
    enough: Callable[[str], bool] = lambda name: True


COLOURS = {  # the same on every picture
    "plain": "#222222",
    "control": "#8a8a8a",
    "DMS": "#c0392b",
    "KVpop": "#8e44ad",
    "KVzap": "#b9770e",
    "ExpectedAttention": "#2471a3",
    "SnapKV": "#148f77",
    "TOVA": "#7d8c2f",
    "H2O": "#5d6d7e",
    "StreamingLLM": "#d68910",
}
Curves = dict[str, tuple[str, ...]]  # name -> systems


def draw_curves(path: pathlib.Path, name: str, *, title: str, curves: Curves) -> None:
    """GSM8K against the peak of live tokens, every method at every budget that was asked.

    Systems that the record does not have yet are left out.
    """
    from matplotlib.figure import Figure

    asked = {row["system"] for row in record(name)["rows"] if row["measure"] == "gsm8k"}
    asked |= set(record(name).get("groups", {}))

    def point(system: str) -> tuple[float, Measured]:
        """The peak, and the score in percent."""
        score = mean_over_seeds(scores(name, system, "gsm8k"))
        return _mean(name, system, "gsm8k", "peak"), Measured(100 * score.value, 100 * score.error)

    figure = Figure(figsize=(8.6, 4.8), layout="constrained")
    axes = figure.subplots()
    peak, base = point("plain")
    drawn = [(peak, base)]
    axes.axhline(base.value, color=COLOURS["plain"], linewidth=1, linestyle=":")
    axes.errorbar([peak], [base.value], yerr=[base.error], color=COLOURS["plain"], marker="s")
    axes.annotate("the model itself, greedy", (peak, base.value), (-8, 8), ha="right",
                  textcoords="offset points", color=COLOURS["plain"])  # fmt: skip
    for method, systems in curves.items():
        found = [point(each) for each in systems if each.partition(":")[0] in asked]
        if not found:
            continue
        found.sort(key=lambda each: each[0])
        drawn += found
        axes.errorbar(
            [x for x, _ in found],
            [y.value for _, y in found],
            yerr=[y.error for _, y in found],
            color=COLOURS[method],
            marker="o",
            markersize=4,
            capsize=2,
            linewidth=2 if method == "DMS" else 1.1,
            label=method,
        )
    least = min(x for x, _ in drawn) / 1.07
    prompt = 105  # tokens of a question with Qwen's template, on average
    if least < prompt:
        axes.axvspan(least, prompt, color="#000000", alpha=0.05, linewidth=0)
        axes.text(prompt - 1, 0.6, "the prompt alone", ha="right", fontsize=8, color="#555555")
    axes.set_xscale("log")
    axes.set_xlim(least, 1.09 * max(x for x, _ in drawn))
    ticks = [each for each in (64, 80, prompt, 127, 200, 300) if least < each < 0.9 * peak]
    ticks.append(round(peak))
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(0, max(1.0, 1.13 * max(y.value for _, y in drawn)))
    axes.set_xlabel(
        f"peak of live tokens, mean over layers and heads (the model itself: {peak:.0f})"
    )
    count = len(rows(name, "plain", "gsm8k")[-1]["scores"])
    axes.set_ylabel(f"GSM8K, % of {count:,} problems, greedy")
    axes.set_title(title)
    axes.legend(loc="lower right", fontsize=8, ncols=2)
    axes.grid(alpha=0.2)
    figure.savefig(path, dpi=120)


def draw_frontier(
    path: pathlib.Path, name: str, *, title: str, systems: dict[str, str], measure: str = "gsm8k"
) -> None:
    """Votes against reads and peak, with the greedy chain of every system.

    Args:
      path: the picture.
      name: the record.
      title: above it.
      systems: of the record, and how the picture names them.
      measure: the task.
    """
    from dms_jax.analysis.hyperscaling_plot import hyperscaling_figure

    found = points(name, tuple(systems), measure)
    renamed = [dataclasses.replace(each, system=systems[each.system]) for each in found.points]
    hyperscaling_figure(path, Hyperscaling({}, tuple(renamed)), title=title)


def _frontier_of_1_5b(task: str, measure: str) -> Picture:
    return Picture(
        "1.5b",
        functools.partial(
            draw_frontier,
            title=f"{task}, Qwen2.5-Coder-1.5B: votes (dots), one greedy chain (squares)",
            systems={"plain": "plain", "dms-3.3:*": "DMS, 3.3x"},
            measure=measure,
        ),
        enough=lambda name: (
            {"plain", "dms-3.3"}
            <= {each["system"] for each in record(name)["votes"] if each["measure"] == measure}
        ),
    )


PICTURES = {
    "real_models/gsm8k.png": Picture(
        "0.5b",
        functools.partial(
            draw_curves,
            title="Qwen2.5-Coder-0.5B-Instruct: DMS holds a third of the tokens (nine trainings "
            "pooled there)",
            curves={
                "DMS": ("nine", "low-rank@2", "low-rank-to-8@8:*", "low-rank-to-4@4:*"),
                "KVpop": ("kvpop@2", "kvpop", "kvpop@4", "kvpop@8"),
                "KVzap": ("kvzap@2", "kvzap", "kvzap@4", "kvzap@8"),
                "ExpectedAttention": (
                    *("expected-attention@2", "expected-half-more", "expected-attention"),
                    *("expected-attention@4", "expected-attention@8"),
                ),
                "SnapKV": ("snapkv@2", "snapkv", "snapkv@4", "snapkv@8"),
                "TOVA": ("tova@2", "tova-half-more", "tova", "tova@4", "tova@8"),
                "H2O": ("h2o@2", "h2o", "h2o@4", "h2o@8"),
                "StreamingLLM": (
                    *("streamingllm@2", "streamingllm", "streamingllm@4", "streamingllm@8"),
                ),
            },
        ),
    ),
    "real_models/frontier.png": Picture(
        "0.5b",
        functools.partial(
            draw_frontier,
            title="GSM8K, Qwen2.5-Coder-0.5B: votes at 0.7 (dots), one greedy chain (squares)",
            systems={
                "plain:8": "plain",
                "control:8": "trained further",
                "from-attention:8": "DMS, 3.0x",
            },
        ),
    ),
    "real_models/gsm8k-1.5b.png": Picture(
        "1.5b",
        functools.partial(
            draw_curves,
            title="Qwen2.5-Coder-1.5B-Instruct: what is held, and what is solved",
            curves={
                "control": ("control:*",),
                "DMS": ("dms-3.3@2:*", "dms-3.3:*", "dms-8:*"),
                "KVpop": ("kvpop:*",),
                "ExpectedAttention": ("expected/peak", "expected/share"),
                "SnapKV": ("snapkv-64/peak", "snapkv-64/share"),
                "TOVA": ("tova/peak", "tova/share"),
                "H2O": ("h2o/peak", "h2o/share"),
                "StreamingLLM": ("streamingllm/peak", "streamingllm/share"),
            },
        ),
        enough=lambda name: any(each["system"].endswith("/peak") for each in record(name)["rows"]),
    ),
    "real_models/frontier-gsm8k-1.5b.png": _frontier_of_1_5b("GSM8K", "gsm8k"),
    "real_models/frontier-math500-1.5b.png": _frontier_of_1_5b("MATH-500", "math500"),
}


def main(config: Config) -> int:
    """Compares or writes; 1 if a page differed."""
    differs = 0
    for name in PAGES:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        count, right = formulas(text), recomputed(text)
        wrong = [
            f"  {one.group(0)}  ->  {other.group(0)}"
            for one, other in zip(TAGGED.finditer(text), TAGGED.finditer(right), strict=True)
            if one.group(0) != other.group(0)
        ]
        print(f"{name}: {count} numbers, {len(wrong)} differ from the records")
        print(*wrong, sep="\n" if wrong else "", end="\n" if wrong else "")
        differs += len(wrong)
        if config.write and wrong:
            page.write_text(right, encoding="utf-8")
    if config.write:
        for name, picture in PICTURES.items():
            there = (RESULTS / RECORDS[picture.record]).exists()
            if there and picture.enough(picture.record):
                picture.draw(RESULTS / name, picture.record)
        return 0
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
