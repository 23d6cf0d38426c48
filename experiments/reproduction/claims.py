"""Recompute every number of the evidence pages from the records, and draw their pictures.

    python -m experiments.reproduction.claims            # lists the numbers that differ; 1 if any
    python -m experiments.reproduction.claims --write    # corrects them, and draws the pictures

A comment at the end of a page, which Markdown hides, quotes the words around each number, with its
formula in its place:

    <!-- Formulas of the numbers
    loses {lost 0.5b nine plain gsm8k} points
    -->

    score RECORD SYSTEMS MEASURE           mean score, percent; `score-error`: with its error
    gap RECORD SYSTEMS SYSTEMS MEASURE     difference in points, paired by problem; `lost`: with the
                                           other sign. MEASURE a+b+c: the mean of several tasks
    nats RECORD SYSTEM SYSTEM MEASURE      difference in nats
    peak | reads | problems | trainings | tokens RECORD SYSTEMS MEASURE
    times RECORD SYSTEM SYSTEM MEASURE [peak | reads]   how much more the second has
    gain RECORD SYSTEM SYSTEM reads|peak [MEASURE]      average gain of votes over the best decoding
                                           of the second
    gain-from RECORD SYSTEM SYSTEM reads|peak TIMES [MEASURE]      the same, from so many times the
                                           budget of the second's longest greedy chain on
    sampled RECORD SYSTEM SYSTEM AXIS      the same without greedy points: misleading
    votes RECORD SYSTEM CHAINS [MEASURE]   score of the vote of so many chains ("9", or "9@0.7" if
                                           there are several temperatures); 0 chains: greedy
    votes-spent RECORD SYSTEM CHAINS reads|peak [MEASURE]      what these chains spend on a problem
    votes-gap | votes-reads RECORD SYSTEM CHAINS SYSTEM CHAINS [MEASURE]    difference, ratio
    json FILE KEY ... [/ FILE KEY ...] FORMAT    a value of another report, or the ratio of two; a
                                           number may replace either
    verdict FORMULA > BOUND [and FORMULA > BOUND ...]

`records` defines SYSTEMS and MEASURE. Errors are one standard error over problems and trainings. A
verdict is "shown" if every difference is above its bound by two errors, "partly" if some are; if
none is, "contradicted" if one is below its bound by two errors, else "not shown".
"""

import dataclasses
import json
import math
import pathlib
import re
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from dms_jax.command_line.running import run
from dms_jax.errors import DataError
from dms_jax.evaluation import Measured, Point, difference, mean_over_seeds
from dms_jax.evaluation.bootstrap import Trial, measured_average_gain
from experiments.reproduction.pictures import PICTURES
from experiments.reproduction.records import RESULTS, gap, mean_of, points, rows, scores

ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGES = (
    "README.md",
    "experiments/results/CLAIMS.md",
    "experiments/results/real_models/README.md",
    "experiments/results/real_models/qwen2.5-coder-0.5b.md",
    "experiments/results/reasoner_11m/README.md",
    "experiments/results/serving/README.md",
    "experiments/results/speed/README.md",
    "experiments/docs/pages/policies.md",
    "experiments/docs/pages/retrofitting.md",
    "dms_jax/assets/smollm2-135m-instruct-dms/README.md",
    "dms_jax/assets/reasoner-11m-dms/README.md",
)
_SHOWN = r"\*\*[a-z ]+\*\*|[-+]?\d[\d,]*(?:\.\d+)?(?: ± (?:\d+(?:\.\d+)?|unknown))?"
TAGGED = re.compile(rf"(?P<shown>{_SHOWN})<!--= (?P<formula>.+?) -->")
QUOTES = "<!-- Formulas of the numbers\n"  # the comment at the end


@dataclasses.dataclass(frozen=True)
class Config:
    """Recompute every number of the pages about evidence from the records."""

    write: bool = False
    """Correct the pages, and draw the pictures."""


# -- formulas -------------------------------------------------------------------------------------


def _gain(
    name: str, left: str, right: str, axis: Any, *measure: str, at_least: float = 0.0
) -> Measured:
    whole = points(name, (right, left), *measure)
    found = whole.average_gain(left, right, axis, at_least=at_least)
    if found is None:
        raise DataError(f"{left} and {right} of {name} share no budget, or lack a greedy point.")
    return found


def _gain_from(name: str, left: str, right: str, axis: Any, times: str, *measure: str) -> Measured:
    greedy = _point(name, right, "0", *measure).budget(axis)
    return _gain(name, left, right, axis, *measure, at_least=float(times) * greedy)


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
    """The point with that many chains and the longest answers."""
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


def _votes_gap(
    name: str, left: str, chains: str, right: str, others: str, *measure: str
) -> Measured:
    one, other = _point(name, left, chains, *measure), _point(name, right, others, *measure)
    return difference(one.scores["vote"], other.scores["vote"])


def _votes_reads(
    name: str, left: str, chains: str, right: str, others: str, *measure: str
) -> float:
    one, other = _point(name, left, chains, *measure), _point(name, right, others, *measure)
    return one.budget("reads") / other.budget("reads")


def _votes_spent(name: str, system: str, chains: str, axis: Any, *measure: str) -> str:
    return f"{_point(name, system, chains, *measure).budget(axis):,.0f}"


def _times(name: str, one: str, other: str, measure: str, what: str = "peak") -> float:
    return mean_of(what, name, other, measure) / mean_of(what, name, one, measure)


def _nats(name: str, left: str, right: str, measure: str) -> str:
    one, other = (
        np.asarray([row["nats"] for row in rows(name, x, measure)]) for x in (left, right)
    )
    found = difference(one, other)
    return f"{found.value:+.3f} ± {found.error:.3f}"


def _json(*words: str) -> str:
    *parts, form = words
    values = []
    for part in " ".join(parts).split(" / "):
        file, *keys = part.split(" ")
        value: Any = json.loads((RESULTS / file).read_text(encoding="utf-8")) if keys else file
        for key in keys:
            value = value[int(key)] if isinstance(value, list) else value[key]
        values.append(float(value))
    return format(values[0] / values[1] if len(values) == 2 else values[0], form)


def _negative(value: Measured) -> Measured:
    return Measured(-value.value, value.error)


MEASURED: dict[str, Callable[..., Measured]] = {
    "gap": gap,
    "lost": lambda *words: _negative(gap(*words)),
    "gain": _gain,
    "gain-from": _gain_from,
    "sampled": _sampled,
    "votes-gap": _votes_gap,
}
PLAIN: dict[str, Callable[..., str]] = {
    "score": lambda *words: f"{100 * scores(*words).mean():.1f}",
    "score-error": lambda *words: _percent(mean_over_seeds(scores(*words)), sign=""),
    "votes": lambda *words: f"{100 * _point(*words).accuracy().value:.1f}",
    "votes-reads": lambda *words: f"{_votes_reads(*words):.1f}",
    "votes-spent": _votes_spent,
    "peak": lambda *words: f"{mean_of('peak', *words):,.0f}",
    "reads": lambda *words: f"{mean_of('reads', *words):,.0f}",
    "problems": lambda *words: f"{rows(*words)[-1]['problems']:,}",
    "trainings": lambda *words: str(len(scores(*words))),
    "tokens": lambda *words: f"{mean_of('million_tokens', *words):.0f}",
    "times": lambda *words: f"{_times(*words):.1f}",
    "nats": _nats,
    "json": _json,
}


def _percent(value: Measured, sign: str) -> str:
    error = "unknown" if math.isnan(value.error) else f"{100 * value.error:.1f}"
    return f"{100 * value.value:{sign}.1f} ± {error}"


def computed(formula: str) -> str:
    """Returns the text of a formula's value on a page.

    Raises:
      DataError: there is no such formula, or the records lack its data.
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
    """Returns the verdict on differences that should exceed bounds in points; see the module."""
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


# -- pages ----------------------------------------------------------------------------------------


def inlined(text: str) -> str:
    """Returns a page with the formulas of the comment at its end beside their numbers.

    Raises:
      DataError: a quotation does not occur exactly once.
    """
    page, comment, quotes = text.partition(QUOTES)
    found: dict[int, str] = {}  # end of a number -> its formula
    for quote in quotes.partition("-->")[0].splitlines():
        words = re.split(r"\{(.+?)\}", quote)
        numbers = rf"(?<![\d.,])({_SHOWN})".join(
            r"\s+".join(map(re.escape, part.split(" "))) for part in words[::2]
        )
        places = list(re.finditer(numbers, page))
        ends = [place.end(number) for place in places for number in range(1, len(words[1::2]) + 1)]
        if len(places) != 1 or not ends or not found.keys().isdisjoint(ends):
            raise DataError(f"{quote!r} quotes {len(places)} places, not a number of its own.")
        found |= zip(ends, words[1::2], strict=True)
    for end in sorted(found, reverse=True):
        page = f"{page[:end]}<!--= {found[end]} -->{page[end:]}"
    return page + comment + quotes


def recomputed(text: str) -> str:
    """Returns a page with every number recomputed."""
    return TAGGED.sub(
        lambda found: f"{computed(found['formula'])}<!--= {found['formula']} -->", text
    )


def formulas(text: str) -> int:
    """Returns the number of formulas on a page.

    Raises:
      DataError: a formula does not follow a number or a verdict.
    """
    count = len(TAGGED.findall(text))
    if count != text.count("<!--= "):
        raise DataError(f"{text.count('<!--= ') - count} formulas follow no number.")
    return count


def main(config: Config) -> int:
    """Compares or corrects the pages; 1 if a page differs."""
    differs = 0
    for name in PAGES:
        page = ROOT / name
        text = inlined(page.read_text(encoding="utf-8"))
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
            page.write_text(TAGGED.sub(lambda found: found["shown"], right), encoding="utf-8")
    if not config.write:
        return 1 if differs else 0
    for name, draw in PICTURES.items():
        draw(RESULTS / name)
    return 0


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
