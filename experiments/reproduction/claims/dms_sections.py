"""Sections of the page on DMS: hyper-scaling, one chain, windows, losses, tokens, decisions."""

import pathlib
from collections.abc import Sequence

from dms_jax.evaluation.hyperscaling_result import AXES, Axis, EqualBudget, Hyperscaling
from experiments.reproduction.claims import figures
from experiments.reproduction.claims.cells import (
    ERRORS,
    HEADS,
    KINDS,
    kinds,
    percent,
    row,
    table,
    verdict,
    within,
)
from experiments.reproduction.claims.results import Results
from experiments.reproduction.claims.systems import (
    DMC,
    DMS,
    FREE_RATIOS,
    RATIOS,
    TRAININGS,
    VANILLA,
)

FOLDER = "claims"  # of the pictures, beside the page
SYSTEMS = {  # of the frontier, under the names of the page
    "vanilla": VANILLA,
    "DMS": DMS,
    "DMC": DMC,
    "Quest": "quest",
    "TOVA": "tova",
    "StreamingLLM": "streaming",
    "H2O": "h2o",
}
DRAWN = ("vanilla", "DMS", "DMC", "Quest", "TOVA", "StreamingLLM")


def hyperscaling(frontier: Hyperscaling, folder: pathlib.Path) -> str:
    if {"vanilla", "DMS"} - set(frontier.systems):
        return ""
    drawn = Hyperscaling(frontier.settings, tuple(p for p in frontier.points if p.system in DRAWN))
    figures.frontier(drawn, folder / "frontier.png")
    others = [name for name in frontier.systems if name != "DMS"]
    rows, lines = [], []
    for axis in AXES:
        gains = {name: frontier.average_gain("DMS", name, axis, "vote") for name in others}
        rows.append([f"equal {axis}", *(percent(gains[name], sign=True) for name in others)])
        pairs = frontier.equal_budget("DMS", "vanilla", axis, "vote")
        best = max(pairs, key=_surely, default=None)
        if best is not None:
            lines.append(
                f"- At equal {axis} DMS beats vanilla somewhere on the frontier by more than two "
                f"standard errors: {verdict(best.gain)}, the point {best.point.label} (L-W-CR), "
                f"best of {len(pairs)}.{_where_whole(frontier, pairs, axis)}"
            )
        lines += [
            f"- Average gain of DMS over {name} at equal {axis}: {verdict(gains[name])}."
            for name in others
        ]
    return f"""## Hyper-scaling: accuracy at equal reads and equal peak

*DMS paper, figures 2 to 4, tables 10 and 11: with the cache made small, a model that thinks longer
or in more chains answers better at the same budget.* Answers of at most L = 128, 256, 512 or 1024
tokens, W = 1 to 16 chains whose majority counts, ratios of 2 to 8; budgets are sums over the
chains. Systems without training have a budget of (prompt + L) / ratio, as in the paper. With fewer
than 16 chains the score is the mean over the disjoint groups. H2O is in the table and not drawn.

![score against reads and peak]({FOLDER}/frontier.png)

Average gain of DMS between the frontiers, in points, over the budgets that both cover, every token
of which counts alike (errors by bootstrap over problems and seeds):

{table(["", *others], rows)}

{chr(10).join(lines)}"""


def _surely(pair: EqualBudget) -> float:
    """What is left of a gain after its errors."""
    return pair.gain.value - ERRORS * pair.gain.error


def _where_whole(frontier: Hyperscaling, pairs: Sequence[EqualBudget], axis: Axis) -> str:
    """The same beside answers of vanilla that are not cut off at L tokens."""
    whole = [p.budget(axis) for p in frontier.frontier("vanilla", axis) if p.ended >= 0.99]
    if not whole:
        return ""
    kept = [pair for pair in pairs if pair.point.budget(axis) >= min(whole)]
    best = max(kept, key=_surely, default=None)
    shown = "no point" if best is None else f"{verdict(best.gain)}, {best.point.label}"
    return f" Where vanilla's answers end by themselves (from {min(whole):,.0f} on): {shown}."


def one_chain(results: Results) -> str:
    rows = [row(results, "vanilla", VANILLA, "1")]
    rows += [row(results, "control: trained further, nothing evicted", "further", "8")]
    rows += [row(results, f"**DMS** at {r:g}", DMS, f"{r:g}") for r in RATIOS]
    rows += [row(results, f"DMC at {r:g}", DMC, f"{r:g}") for r in TRAININGS[DMC].settings]
    rows += [row(results, "DMC at 4, trained long", "dmc-long", "4")]
    for name in ("Quest", "TOVA", "H2O", "StreamingLLM"):
        rows += [row(results, f"{name} at {r:g}", SYSTEMS[name], f"{r:g}") for r in FREE_RATIOS]
    four = results.gap((DMS, "4"), (VANILLA, "1"), "reasoning")
    eight = results.gap((DMS, "8"), (VANILLA, "1"), "reasoning")
    long = results.gap(("dmc-long", "4"), (VANILLA, "1"), "reasoning")
    heads = [head for kind in KINDS for head in (f"{kind}, %", "above vanilla")]
    shown = (
        ("vanilla", VANILLA, "1"),
        ("control: trained further, nothing evicted", "further", "8"),
        *((f"**DMS** at {ratio:g}", DMS, f"{ratio:g}") for ratio in RATIOS),
        *((f"DMC at {ratio:g}", DMC, f"{ratio:g}") for ratio in TRAININGS[DMC].settings),
        ("DMC at 4, trained long", "dmc-long", "4"),
        *((f"{name} at 4", SYSTEMS[name], "4") for name in ("Quest", "TOVA", "H2O")),
        *((f"StreamingLLM at {ratio}", "streaming", f"{ratio}") for ratio in (2, 4)),
    )
    return f"""## One chain

*DMS paper, table 1: at 4 nearly nothing is lost, at 8 a few points; DMC paper, table 3.* Rows of
the same ratio have not the same peak: a budget of (prompt + L) / ratio is more than that share of
an answer that ends before L. Compare rows of a similar peak.

{table(HEADS, rows)}

- DMS at 4 is within 2 points of vanilla on reasoning: {within(four, 2)}.
- DMS at 8 is within 4 points: {within(eight, 4)}.
- DMC at 4, trained long, is within 5 points: {within(long, 5)}.

The same by kind of problem. Arithmetic and word chains were taught with slips, linear equations
without, so that what a cache loses shows most clearly in these:

{table(["", *heads], [kinds(results, *each) for each in shown])}"""


def windows(results: Results, folder: pathlib.Path) -> str:
    names = {
        "window 0": "dms-w0",
        "window 16, immediate": "dms-w16-immediate",
        "window 16, delayed": DMS,
        "window 64, immediate": "dms-w64-immediate",
        "window 64, delayed": "dms-w64-delayed",
        "window 256, immediate": "dms-w256-immediate",
        "window 256, delayed": "dms-w256-delayed",
    }
    rows = [
        row(results, f"{label}, at {ratio}", system, ratio)
        for ratio in ("2", "3", "4")
        for label, system in names.items()
    ]
    figures.windows(results, names, folder / "windows.png")
    gaps = {
        window: results.gap((delayed, "4"), (f"dms-w{window}-immediate", "4"), "reasoning")
        for window, delayed in ((16, DMS), (64, "dms-w64-delayed"), (256, "dms-w256-delayed"))
    }
    lines = [
        f"- At 4 with a window of {window}, deciding as a token enters beats deciding as it "
        f"leaves: {verdict(gap)}."
        for window, gap in gaps.items()
    ]
    none = results.gap((DMS, "4"), ("dms-w0", "4"), "reasoning")
    return f"""## Windows, and when a token is decided on

*DMS paper, table 6: eviction after a delay keeps what immediate eviction loses, and a window of 0
fails.* "Immediate" reads the decision from the token at the other end of the window
(`shift=window`), "delayed" from the next token, and evicts at the window's end. Sequences here have
about 420 tokens, so that a window of 256 leaves little to evict.

{table(HEADS, rows)}

![windows]({FOLDER}/windows.png)

{chr(10).join(lines)}
- At 4 a window of 16 beats one of 0: {verdict(none)}."""


def losses(results: Results) -> str:
    rows = [
        row(results, f"{label}, at {ratio}", system, ratio)
        for label, system, ratios in (
            ("DMS, distillation", DMS, ("2", "3", "4")),
            ("DMS, language modelling", "dms-lm", ("2", "3", "4")),
            ("DMC, distillation", DMC, ("2", "4")),
            ("DMC, language modelling", "dmc-lm", ("2", "4")),
        )
        for ratio in ratios
    ]
    dms = results.gap((DMS, "4"), ("dms-lm", "4"), "reasoning")
    dmc = results.gap((DMC, "4"), ("dmc-lm", "4"), "reasoning")
    return f"""## Distillation or the language modelling loss

*DMS paper, tables 5 and 8: an 8B model can be retrofitted with the plain loss, a 1B model
deteriorates.*

{table(HEADS, rows)}

- Distillation is better for DMS at 4: {verdict(dms)}. For DMC at 4: {verdict(dmc)}."""


def tokens(results: Results, folder: pathlib.Path) -> str:
    series = {
        "DMS at 4": ("dms-tenth", "dms-third", DMS, "dms-triple"),
        "DMC at 4": ("dmc-third", DMC, "dmc-long"),
    }
    rows = []
    for label, systems in series.items():
        for system in systems:
            logs = results.training(system)
            tokens = tokens_to(results, system, 4.0)
            if logs and tokens:
                rows.append(
                    [
                        f"{label}: {system}",
                        f"{tokens / 1e6:.0f}",
                        *row(results, "", system, "4")[1:],
                    ]
                )
    figures.tokens(results, series, tokens_to, folder / "tokens.png")
    gap = results.gap((DMS, "4"), ("dmc-long", "4"), "reasoning")
    third = results.gap(("dms-third", "4"), (DMC, "4"), "reasoning")
    fewer = results.gap(("dms-third", "4"), ("dmc-long", "4"), "reasoning")
    triple = results.gap(("dms-triple", "4"), (DMS, "4"), "reasoning")
    longer = results.gap(("dmc-long", "4"), (DMC, "4"), "reasoning")
    few, many = (tokens_to(results, system, 4.0) for system in ("dms-third", "dmc-long"))
    times = f"{many / few:.0f} times as many tokens" if few and many else "many more tokens"
    return f"""## Tokens of training

*DMS paper: DMS needs about eight times fewer tokens than DMC; both papers: more steps a unit of
ratio are better.* Millions of tokens until the ratio of 4 is reached (DMC: until it has settled).

{table(("", "million tokens", *HEADS[1:]), rows)}

![accuracy against tokens]({FOLDER}/tokens.png)

- DMS after a third of its steps a ratio is above DMC with all of its own: {verdict(third)}.
- DMS after a third of its steps a ratio is above DMC trained long, on {times}: {verdict(fewer)}.
- DMS with its own steps is above DMC trained long: {verdict(gap)}.
- Three times the steps a ratio are better for DMS: {verdict(triple)}. The long training is better
  for DMC: {verdict(longer)}."""


def tokens_to(results: Results, system: str, ratio: float) -> float | None:
    """Tokens that a training had read when its model at a ratio was taken."""
    logs = results.training(system)
    if not logs:
        return None
    training = TRAININGS[system]
    recipe = training.recipe(results.config)
    policy = training.policy
    assert policy is not None
    steps = recipe.total_steps(policy)
    if ratio in training.snapshots:
        steps = next(
            done
            for done in range(1, steps + 1)
            if recipe.progress(done, policy).compression_ratio >= ratio - 1e-9
        )
    return float(steps * recipe.batch_size * recipe.sequence_length)


def decisions(results: Results) -> str:
    rows = [row(results, f"DMS, at {r:g}", DMS, f"{r:g}") for r in RATIOS]
    rows += [row(results, f"decisions drawn, at {r:g}", "dms-drawn", f"{r:g}") for r in RATIOS]
    rows += [row(results, f"two-sided (KL) loss on the ratio, at {r}", "dms-kl", r) for r in "234"]
    rows += [row(results, "the target of 4 from the first step on", "dms-at-once", "4")]
    lines = [
        f"- At 4 the sign of the logit is better than a draw: "
        f"{verdict(results.gap((DMS, '4'), ('dms-drawn', '4'), 'reasoning'))}.",
        f"- The one-sided loss is better than the two-sided one: "
        f"{verdict(results.gap((DMS, '4'), ('dms-kl', '4'), 'reasoning'))}.",
        f"- A ramp is better than the target at once: "
        f"{verdict(results.gap((DMS, '4'), ('dms-at-once', '4'), 'reasoning'))}.",
    ]
    return f"""## Decisions drawn, the loss on the ratio, the ramp

*DMS at inference takes the sign of a logit whose training was a draw; its loss on the ratio has one
side; the ratio rises slowly (DMS paper, section 3).*

{table(HEADS, rows)}

{chr(10).join(lines)}"""
