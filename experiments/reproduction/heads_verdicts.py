"""The claims of the DMC paper about heads, each beside its numbers and a verdict by a fixed rule.

A difference counts if it is more than two standard errors over texts. Layers are compared by rank
(Spearman's correlation of a layer's depth and its compression ratio, text by text).
"""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from dms_jax.analysis import Retention
from dms_jax.analysis.retention import ratios
from experiments.reproduction import summaries
from experiments.reproduction.files import wrap, write_text
from experiments.reproduction.over_training import OverTraining

LEAST_RATIO = 1.1  # a model that compresses less says nothing of where it compresses


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One claim and what the runs say of it.

    Attributes:
      picture: file that shows it.
      source: where the claim is made.
      claim: what it says.
      numbers: what was measured.
      verdict: "holds", "holds in part" or "does not hold".
    """

    picture: str
    source: str
    claim: str
    numbers: str
    verdict: str


def report(
    reasoner: Mapping[str, Retention],
    needles: Mapping[str, Retention],
    stories: Mapping[str, Retention],
    kinds: Sequence[Sequence[summaries.Kind]],
    courses: Mapping[str, OverTraining],
) -> list[Verdict]:
    """Returns all verdicts; `kinds` are those of the stories' tokens."""
    learned = {
        "DMS, reasoner-11m": reasoner["DMS"],
        "DMS, stories260K": stories["DMS"],
        "DMC, stories260K": stories["DMC"],
    }
    learned = {
        name: found
        for name, found in learned.items()
        if summaries.total_ratio(found)[-1] >= LEAST_RATIO
    }
    return [
        deeper(learned),
        last_layer(learned),
        early_heads(learned),
        over_time(courses),
        growth({"DMS, needles": needles["DMS"]} | learned),
        position(learned),
        linguistic(stories["DMC"], kinds),
        texts_alike(learned),
        without_training(reasoner),
    ]


def layer_ratios(found: Retention) -> np.ndarray:
    """Returns the compression ratio of each layer in each text at its end, [B, L]."""
    return (found.length / found.live()[..., -1].mean(2)).T


def depth_correlation(found: Retention) -> tuple[float, float]:
    """Returns the mean over texts of the rank correlation of ratio and depth, and its error."""
    ratio = layer_ratios(found)
    ranks = ratio.argsort(1, kind="stable").argsort(1)
    depth = np.arange(ratio.shape[1])
    return mean_and_error(np.array([np.corrcoef(depth, row)[0, 1] for row in ranks]))


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """Returns the mean and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def _all_or_some(passes: Sequence[bool]) -> str:
    if all(passes):
        return "holds"
    return "holds in part" if any(passes) else "does not hold"


def deeper(learned: Mapping[str, Retention]) -> Verdict:
    """Figure 6: deeper layers are compressed more."""
    found = {name: depth_correlation(one) for name, one in learned.items()}
    return Verdict(
        "ratios.png",
        "DMC, section 5.3 and figures 6 and 12",
        "Compressing deeper layers is universally the most popular strategy; higher layers merge "
        "longer sequences of tokens.",
        "Rank correlation of depth and ratio: "
        + "; ".join(f"{name} {mean:+.2f} ± {error:.2f}" for name, (mean, error) in found.items()),
        _all_or_some([mean > 2 * error for mean, error in found.values()]),
    )


def last_layer(learned: Mapping[str, Retention]) -> Verdict:
    """Figure 6: the last layers are compressed a little less."""
    numbers, passes = [], []
    for name, one in learned.items():
        ratio = layer_ratios(one)
        deepest = ratio[:, ratio.shape[1] // 2 : -1].max(1)
        mean, error = mean_and_error(np.log2(ratio[:, -1] / deepest))
        numbers.append(f"{name} {2**mean:.2f} times")
        passes.append(mean < -2 * error)
    return Verdict(
        "ratios.png",
        "DMC, section 5.3",
        "The very final layers are compressed to a somewhat reduced degree.",
        "Ratio of the last layer over the highest of the second half before it: "
        + "; ".join(numbers),
        _all_or_some(passes),
    )


def early_heads(learned: Mapping[str, Retention]) -> Verdict:
    """Figure 6: some heads shortly after the first layer are compressed extremely."""
    numbers, passes = [], []
    for name, one in learned.items():
        ratio = ratios(one)
        early = ratio[1 : 1 + max(len(ratio) // 4, 1)].max()
        rank = float((ratio <= early).mean())
        numbers.append(f"{name} {early:.1f} (of all heads {rank:.0%} are no higher)")
        passes.append(rank >= 0.9)
    return Verdict(
        "ratios.png",
        "DMC, section 5.3",
        "Several heads in the few layers after the very first one reach extremely high ratios.",
        "Highest ratio in the first quarter after layer 0: " + "; ".join(numbers),
        _all_or_some(passes),
    )


def over_time(courses: Mapping[str, OverTraining]) -> Verdict:
    """Figure 7: training compresses later layers first."""
    numbers, passes = [], []
    for name, course in courses.items():
        if course.totals[-1] < LEAST_RATIO:
            continue
        half = course.heads.shape[1] // 2
        logs = np.log2(course.heads).mean(2)
        deep, shallow = logs[:, -half:].mean(1), logs[:, :half].mean(1)
        steps = [
            f"{2**a:.2f} and {2**b:.2f} at {total:.2f}"
            for a, b, total in zip(deep, shallow, course.totals, strict=True)
        ]
        numbers.append(f"{name} " + ", ".join(steps))
        passes.append(bool(deep[0] > shallow[0] and shallow[-1] > shallow[0]))
    return Verdict(
        "training.png",
        "DMC, appendix C and figure 7",
        "Early in training the later layers are compressed; as the global ratio rises, the earlier "
        "layers follow.",
        "Geometric mean of the ratios of the deeper and of the earlier half, at each global ratio: "
        + "; ".join(numbers),
        _all_or_some(passes),
    )


def growth(found: Mapping[str, Retention]) -> Verdict:
    """Figure 8: the ratio grows with the logarithm of the length."""
    numbers, passes = [], []
    for name, one in found.items():
        tokens = np.arange(1, one.length + 1)[63:]
        ratio = summaries.total_ratio(one)[63:]
        log_fit, line_fit = (explained(x, ratio) for x in (np.log(tokens), tokens))
        rises = ratio[-1] / ratio[0]
        numbers.append(
            f"{name} {ratio[0]:.2f} to {ratio[-1]:.2f}, {log_fit:.3f} against {line_fit:.3f}"
        )
        passes.append(bool(rises > 1.05 and log_fit >= line_fit))
    return Verdict(
        "length.png",
        "DMC, appendix C and figure 8",
        "The compression ratio is not uniform in the length: it increases logarithmically.",
        "Ratio after 64 tokens and at the end; share of its variance that a line in log(length) "
        "and one in the length explain: " + "; ".join(numbers),
        _all_or_some(passes),
    )


def explained(x: np.ndarray, y: np.ndarray) -> float:
    """Returns the share of the variance of y that a line in x explains."""
    return float(np.corrcoef(x, y)[0, 1] ** 2)


def position(learned: Mapping[str, Retention]) -> Verdict:
    """Figure 9: decisions do not depend on the absolute position."""
    numbers, passes = [], []
    for name, one in learned.items():
        gone = 1 - summaries.held_later(one, 64).mean((0, 2))  # [B, n]
        half = gone.shape[1] // 2
        mean, error = mean_and_error(100 * (gone[:, half:].mean(1) - gone[:, :half].mean(1)))
        numbers.append(f"{name} {mean:+.1f} ± {error:.1f} points")
        passes.append(abs(mean) <= 2 * error)
    return Verdict(
        "position.png",
        "DMC, appendix C and figure 9",
        "The average decision is independent of a token's position in the sequence.",
        "Share of tokens that are gone 64 tokens later, second half less first half of the text: "
        + "; ".join(numbers),
        _all_or_some(passes),
    )


def linguistic(merged: Retention, kinds: Sequence[Sequence[summaries.Kind]]) -> Verdict:
    """Figure 11: some heads merge the parts of words."""
    joins = merged.gone[..., :-1] == np.arange(1, merged.length)  # token t + 1 joins t's slot
    table = np.array([list(one) for one in kinds])[:, 1:]
    joins = np.moveaxis(joins, 1, 2)  # [L, K, B, T - 1]
    part, word = (joins[:, :, table == kind].mean(-1) for kind in ("word part", "word"))
    layer, head = np.unravel_index((part - word).argmax(), part.shape)
    best = part[layer, head] - word[layer, head]
    verdict = "holds" if best > 0.5 else "holds in part" if best > 0.25 else "does not hold"
    return Verdict(
        "stories.html",
        "DMC, appendix D and figure 11",
        "Some heads merge subwords back into words; many heads are not interpretable.",
        f"Layer {layer} head {head} merges {part[layer, head]:.0%} of the tokens that continue a "
        f"word into the slot before, and {word[layer, head]:.0%} of those that begin one; all "
        f"heads together {part.mean():.0%} and {word.mean():.0%}",
        verdict,
    )


def texts_alike(learned: Mapping[str, Retention]) -> Verdict:
    """Ours: the heads that compress most are the same in every text."""
    found = {name: summaries.text_agreement(one) for name, one in learned.items()}
    return Verdict(
        "ratios.png",
        "implied by figure 6, which shows one schema for each model",
        "Which heads compress most belongs to the model, not to the text.",
        "Mean correlation of the heads' log ratios in two texts: "
        + "; ".join(f"{name} {value:.2f}" for name, value in found.items()),
        _all_or_some([value > 0.8 for value in found.values()]),
    )


def without_training(reasoner: Mapping[str, Retention]) -> Verdict:
    """Ours: a rule that lets heads compete finds what training finds."""
    learned = np.log(ratios(reasoner["DMS"])).ravel()
    numbers, passes = [], []
    for name in ("AdaKV", "PyramidKV"):
        rule = np.log(ratios(reasoner[name])).ravel()
        likeness = float(np.corrcoef(learned, rule)[0, 1])
        numbers.append(
            f"{name} {likeness:+.2f}, spread {np.exp(rule.max() - rule.min()):.1f} times"
        )
        passes.append(likeness > 0.5)
    return Verdict(
        "ratios.png",
        "ours",
        "Rules that give heads or layers different budgets find the distribution that DMS learns.",
        "Correlation of log ratios over heads with DMS, whose spread is "
        f"{np.exp(learned.max() - learned.min()):.1f} times: " + "; ".join(numbers),
        _all_or_some(passes),
    )


_PICTURES = {
    "ratios.png": "One cell is one KV head: how many times fewer tokens it holds at the end.",
    "training.png": "stories260K at three moments of each of its two short retrofits.",
    "length.png": "All heads together, as the text grows. A policy with a fixed budget grows along "
    "a straight line in the length, which is a curve over this logarithmic axis.",
    "distance.png": "Of the tokens that lie so far back, the share that heads still hold: the "
    "window on the left, what was chosen behind it, and the prompt that SnapKV's kin hold in full.",
    "position.png": "The same 64 tokens later, by where the token stands in the text.",
    "kinds.png": "In how many more (or fewer) of 100 cases a head holds a token of this kind than "
    "any token. Rows are heads, layer.head.",
    "agreement.png": "+1: two heads hold the same tokens; 0: they know nothing of one another. "
    "White: a head that holds everything or nothing so far back.",
}


def write_page(
    path: pathlib.Path, verdicts: Sequence[Verdict], results: Mapping[str, object]
) -> None:
    """Writes README.md: every picture, with the claims that it tests."""
    live: Mapping[str, float] = results["live_tokens"]  # pyright: ignore[reportAssignmentType]
    totals: Mapping[str, float] = results["totals"]  # pyright: ignore[reportAssignmentType]
    held = sum(each.verdict == "holds" for each in verdicts)
    lines = [
        "# What single heads keep",
        "",
        f"**Finding.** Of {len(verdicts)} claims {held} hold for small models, the others in part "
        "or not.",
        "",
        "| claim | where | verdict | measured |",
        "|---|---|---|---|",
        *(
            f"| {each.claim} | {each.source} | **{each.verdict}** | {each.numbers} |"
            for each in verdicts
        ),
        "",
        "Tokens held at the end of 320, averaged over heads and problems: "
        + ", ".join(f"{name} {value:.1f}" for name, value in live.items())
        + ". Ratios of the retrofits of stories260K over all heads: "
        + ", ".join(f"{name} {value:.2f}" for name, value in totals.items())
        + f". Where a model compresses less than {LEAST_RATIO:g} times, verdicts leave it out.",
        "",
        "In a browser: [a problem](page.html) under all policies side by side, and "
        "[a story](stories.html) under DMS and DMC.",
    ]
    for picture, caption in _PICTURES.items():
        lines += ["", f"![{picture}]({picture})", "", caption]
    lines += [
        "",
        "**Limits.** Models of 11 million and 260 thousand parameters, where the DMC paper "
        "(arXiv 2403.09636, figures 6 to 12) has 7 to 70 billion, and short retrofits. The claims "
        "are of DMC alone; DMS is held to them as well, and *in part* means that some models pass. "
        "DMC-C (figure 10) was not trained.",
        "",
        f"**Command.** `{results['command']}`, {results['device']}, {results['date']}.",
    ]
    write_text(path, wrap("\n".join(lines)) + "\n")
