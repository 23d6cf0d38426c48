"""A verdict on each bar."""

from experiments.reproduction.claims.cells import percent, verdict, within
from experiments.reproduction.real.names import name_of
from experiments.reproduction.real.results import Results, end_of, score
from experiments.reproduction.real.systems import CONTROL, FREE, SHIPPED, UNSEEN, VANILLA
from experiments.reproduction.real.training import QWEN, SMOLLM2

POINTS, FEWER, BELOW, SMALL_POINTS, MINUTES = 2.0, 3.0, 10.0, 1.0, 15  # the bars

# What leaves the memory as it is: it reads fewer entries, or holds them in fewer bytes.
_WHOLE = (VANILLA, "quest", "kcache", "vanilla-float8")
_OTHER_PROBLEMS = "**not measured on the same problems**"


def best_free(results: Results, main: str, peak: float) -> str | None:
    """The method without training that solves most with at most 5% more than a peak.

    It was asked the problems of the retrofit that is judged, whose label is given.
    """
    candidates = [
        label
        for label in results.labels(QWEN, "gsm8k")
        if label in FREE
        and label not in _WHOLE
        and not FREE[label].trained
        and results.records[QWEN, label, "gsm8k"]["peak"] <= 1.05 * peak
        and not results.unpaired(QWEN, main, label, "gsm8k")
    ]
    of = lambda label: score(results.records[QWEN, label, "gsm8k"]).value  # noqa: E731
    return max(candidates, key=of, default=None)


def verdicts(results: Results) -> str:
    """A line for each bar: what is judged, then misses first, then how it was chosen."""
    main = end_of(results.judged)
    record = results.get(QWEN, main, "gsm8k")
    if record is None:
        first, lines = "- The retrofit that was to be judged was not measured.", []
    else:
        fewer = results.fewer(QWEN, main, "gsm8k")
        if fewer is None:
            times = f"at least {FEWER:g} times smaller: {_OTHER_PROBLEMS}"
        else:
            held = "**holds**" if fewer >= FEWER else "**does not hold**"
            times = f"{fewer:.2f} times smaller; at least {FEWER:g} times: {held}"
        how = "decided before the run"
        if not results.decided:
            how = "chosen by the rule below, on training questions alone"
        first = (
            f"- Qwen2.5-Coder-0.5B, {name_of(main)} ({how}): peak {record['peak']:.0f}"
            f"{';' if fewer is None else ','} {times}."
        )
        lines = []
        for measure, how in (("gsm8k", "greedy"), ("frontier", "eight chains a problem")):
            for other, what in ((VANILLA, "the model itself"), (end_of(CONTROL), "the control")):
                gap = results.gap(QWEN, main, other, measure)
                held = within(gap, POINTS)
                if results.unpaired(QWEN, main, other, measure):
                    held = _OTHER_PROBLEMS
                asked = results.get(QWEN, other, measure)
                of = f" (run {asked['run']})" if asked and asked["run"] != results.main else ""
                lines += [f"- GSM8K, {how}: within {POINTS:g} points of {what}{of}: {held}."]
        lines += [_against_free(results, main, record["peak"]), _claim(results, main)]
    lines += [_three(results), *_of_smollm2(results)]
    order = ("**does not hold", "**holds on the mean", "**is not told apart", "**holds**")
    place = lambda line: next((n for n, word in enumerate(order) if word in line), len(order))  # noqa: E731
    return "\n".join([first, *sorted(lines, key=place), *_chosen(results)])


def _of_smollm2(results: Results) -> list[str]:
    if results.get(SMOLLM2, VANILLA, "piqa") is None:
        return ["- SmolLM2-135M-Instruct: **not measured**."]
    lines = []
    told = ((SHIPPED, "the adapter that ships"), ("smollm2-low-rank-w16", "low rank"))
    for training, what in told:
        gap = results.mean_gap(end_of(training), VANILLA)
        run = results.run_of_mean(end_of(training), VANILLA)
        of = "" if run in (None, results.main) else f" (run {run})"
        lines += [
            f"- SmolLM2, {what}, nominal ratio 4: mean of its tasks within {SMALL_POINTS:g} point "
            f"of the model itself{of}: {within(gap, SMALL_POINTS)}."
        ]
    return lines


def _claim(results: Results, main: str) -> str:
    """Hyper-scaling: whether chains that the saved memory pays for solve more."""
    reads, peak = results.vote_gains(main)
    both = [verdict(gap) for gap in (reads, peak)]
    one = results.gap(QWEN, main, VANILLA, "frontier")
    beside = f"; a single chain gains {percent(one, sign=True)}" if one is not None else ""
    return (
        "- The papers' claim, that more chains from the smaller cache solve more than fewer from "
        f"the whole one, at equal reads: {both[0]}, and at equal peak: {both[1]}{beside}."
    )


def _chosen(results: Results) -> list[str]:
    """How the rivals stood on the questions that chose between them, and how the other did."""
    asked = results.rivals(UNSEEN)
    if len(asked) < 2:
        return []
    told = []
    for name in asked:
        solved = percent(score(results.records[QWEN, end_of(name), UNSEEN]))
        far = results.trainings[name]["held_out"]["distillation"]
        told.append(f"{name_of(end_of(name))}: {solved}%, {far:.4f} nats")
    lines = [
        f"- Training questions in no lesson, greedily, and divergence: {'; '.join(told)}. Judged "
        f"is {name_of(end_of(results.judged))}."
    ]
    for name in asked:
        gap = results.gap(QWEN, end_of(name), VANILLA, "gsm8k")
        if name != results.judged and gap is not None:
            lines.append(
                f"- The other, GSM8K, greedy: {percent(gap, sign=True)} to the model itself."
            )
    return lines


def _three(results: Results) -> str:
    """How long a user waits, from an empty directory to a page."""
    told = results.three
    if told is None or told["calls"][-1]["exit"]:
        return "- Three commands from an empty directory to its page: **not measured**."
    stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in told["stages"].items())
    held = "**holds**" if told["seconds"] < 60 * MINUTES else "**does not hold**"
    return (
        f"- Three commands from an empty directory to its page: {told['seconds']:.0f} s on one "
        f"{told['device']} on {told['date']} ({stages}; the library was {told['installed']}, the "
        f"questions were copied); under {MINUTES} minutes: {held}. The third: `{told['command']}`."
    )


def _against_free(results: Results, main: str, peak: float) -> str:
    best = best_free(results, main, peak)
    line = f"- The best method without training at that peak at least {BELOW:g} points lower: "
    if best is None:
        return line + "**not measured**."
    gap = results.gap(QWEN, main, best, "gsm8k")
    assert gap is not None
    holds = gap.value >= BELOW / 100
    beyond = "" if gap.beyond(BELOW / 100) or not holds else " on the mean"
    word = f"**holds{beyond}**" if holds else "**does not hold**"
    return f"{line}{word} ({percent(gap, sign=True)} above {name_of(best)})."
