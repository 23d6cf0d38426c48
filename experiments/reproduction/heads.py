"""What single heads keep: figures 6 to 12 of the DMC paper, for learned and for untrained policies.

    python -m experiments.reproduction.heads --out experiments/results/heads

The shipped reasoner and its DMS retrofit read worked problems and needles in novels token by token
through the paged cache, and so does the reasoner under policies that need no training, with as many
tokens in the cache at the end. stories260K is retrofitted with DMS and with DMC on the spot, which
gives the course of training and what a model that merges does. What was recorded and trained lies
under `--runs`, and a run goes on where another stopped. Writes pictures, two pages, the numbers and
a README with a verdict for each claim. About ten minutes on two cores.
"""

import dataclasses
import json
import pathlib
import sys
from typing import Any

import numpy as np

import dms_jax
from dms_jax import assets
from dms_jax.analysis import Retention, View, eviction_page, retention, token_texts
from dms_jax.analysis.retention import ratios
from dms_jax.command_line.demos.quickstart import held_out
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.data.tasks import Needle, Task, WordChain
from dms_jax.policies import Policy
from dms_jax.policies.budget import Prefill
from dms_jax.training import Recipe, Stage, recipes
from experiments.reproduction import summaries
from experiments.reproduction.head_pictures import Scale, draw_maps
from experiments.reproduction.heads_verdicts import report
from experiments.reproduction.heads_verdicts import write_page as write_readme
from experiments.reproduction.lines import Axes, draw_lines
from experiments.reproduction.over_training import OverTraining, over_training, snapshots_of

DISTANCE = 64  # tokens later, for what is kept by kind and for agreement of heads
DMC = dms_jax.DMC(neuron="first", offset=2.0, temperature=0.3)
KINDS = ("word", "word part", "digits", "punctuation", "space")


@dataclasses.dataclass(frozen=True)
class Config:
    """Draw what single heads keep."""

    out: pathlib.Path = pathlib.Path("runs/heads")
    """Folder for the pictures, the pages, results.json and README.md."""
    runs: pathlib.Path = pathlib.Path("runs/heads-models")
    """Folder of what was recorded and of the two retrofits; what is there is not done again."""
    problems: int = 8
    """Worked problems that the models read."""
    length: int = 320
    """Tokens of each; longer ones are cut."""
    needles: int = 2
    """Needles in novels, each twice as long."""
    stories: int = 8
    """Pieces of stories, of 512 tokens each."""
    dms_steps: int = 8
    """Steps per unit of compression ratio of the DMS retrofit, up to ratio 8."""
    dmc_steps: int = 150
    """Steps of neuron decay and of the ramp of the DMC retrofit to ratio 2; twice as many follow,
    because decisions lag behind the ramp."""


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts of one length, as token ids, with the kind of each token."""

    tokens: np.ndarray
    prompts: np.ndarray
    kinds: list[list[summaries.Kind]]


def worked(model: dms_jax.LanguageModel, task: Task, count: int, length: int) -> Texts:
    """Returns the first test problems with solutions that are so long, cut to that length."""
    tokens, prompts, index = [], [], 0
    while len(tokens) < count:
        problem = task.problem("test", index)
        prompt = model.tokenizer.encode(problem.prompt)
        rest = model.tokenizer.encode(problem.solution, add_special_tokens=False)
        if len(prompt) < length <= len(prompt) + len(rest):
            tokens.append((prompt + rest)[:length])
            prompts.append(len(prompt))
        index += 1
    return texts_of(model, np.array(tokens), np.array(prompts))


def novels(model: dms_jax.LanguageModel, count: int, length: int) -> Texts:
    """Returns haystacks with a needle, as prompts, cut to a length."""
    tokens = [
        model.tokenizer.encode(Needle(size=length).problem("test", index).prompt)[:length]
        for index in range(count)
    ]
    return texts_of(model, np.array(tokens), np.full(count, length // 2))


def texts_of(model: dms_jax.LanguageModel, tokens: np.ndarray, prompts: np.ndarray) -> Texts:
    """Returns texts with the kinds of their tokens."""
    kinds = [summaries.kinds_of(token_texts(model.tokenizer, row.tolist())) for row in tokens]
    return Texts(tokens, prompts, kinds)


def retrofits(
    config: Config, base: dms_jax.LanguageModel
) -> dict[str, list[tuple[float, dms_jax.LanguageModel]]]:
    """Returns the moments of stories260K with DMS and with DMC, trained if they are not there."""
    steps = config.dmc_steps
    dmc = dataclasses.replace(
        recipes.dmc_quickstart(2.0, snapshots=(1.5, 2.0)),
        sequence_length=256,
        batch_size=2,
        stages=(
            Stage("neuron_decay", steps, 5e-4),
            Stage("ramp", steps, 7e-4, 2.0),
            Stage("train", 2 * steps, 7e-4, final_learning_rate=7e-5),
        ),
    )
    dms = recipes.dms_quickstart(8.0, steps_per_ratio=config.dms_steps, snapshots=(2.0, 4.0))
    plans: dict[str, tuple[Policy, Recipe]] = {
        "DMS": (dms_jax.DMS(window=16, source="adapter", shift=0), dms),
        "DMC": (DMC, dmc),
    }
    found = {}
    for name, (policy, recipe) in plans.items():
        out = config.runs / name.lower()
        model = dms_jax.retrofit(
            base, policy, recipe=recipe, data=[assets.path("tinystories") / "train.txt"], out=out
        )
        before = [(ratio, dms_jax.load(path)) for ratio, path in snapshots_of(out)]
        found[name] = [*before, (recipe.compression_ratio, model)]
    return found


def untrained(budget: int) -> dict[str, Policy]:
    """Returns policies that need no training and hold about `budget` tokens a head at the end."""
    scorer = dms_jax.SnapKV(budget=budget - 8, window=16, interval=16)
    prefill: Prefill = "evict_past_budget"  # prompts take no more than the budget
    return {
        "AdaKV": dms_jax.AdaKV(scorer),
        "PyramidKV": dms_jax.PyramidKV(scorer),
        "H2O": dms_jax.H2O(budget=budget - 1, prefill=prefill),
        "TOVA": dms_jax.TOVA(budget=budget - 1, prefill=prefill),
        "StreamingLLM": dms_jax.StreamingLLM(budget=budget),
    }


def main(config: Config) -> dict[str, Any]:
    """Runs everything; returns the numbers."""
    make_folder("--out", config.out)
    dense, learned = (
        dms_jax.load(assets.path(name), dtype="float32")
        for name in ("reasoner-11m", "reasoner-11m-dms")
    )
    base = dms_jax.load(assets.path("stories260k"))

    def held(name: str, model, texts: Texts, policy: Policy | None = None) -> Retention:
        return recorded(config.runs / f"{name}.npz", model, texts, policy)

    problems = worked(dense, WordChain(steps=(8, 12)), config.problems, config.length)
    reasoner = {"DMS": held("problems-DMS", learned, problems)}
    budget = round(reasoner["DMS"].live()[..., -1].mean())
    others = untrained(budget)
    for name, policy in others.items():
        reasoner[name] = held(f"problems-{name}", dense, problems, policy)
    policy = dms_jax.Quest(budget=max(budget // 16, 3) * 16, dense_layers=0)
    quest = held("problems-Quest", dense, problems, policy)
    haystack = novels(dense, config.needles, 2 * config.length)
    needles = {"DMS": held("needles-DMS", learned, haystack)}
    needles["TOVA"] = held("needles-TOVA", dense, haystack, others["TOVA"])

    trained = retrofits(config, base)
    pieces = held_out(base, config.stories)
    told = texts_of(base, pieces, np.zeros(len(pieces), int))
    courses = {name: over_training(models, pieces[:2, :256]) for name, models in trained.items()}
    # Never from a file: these models are made here and may be made again.
    stories = {name: retention(models[-1][1], told.tokens) for name, models in trained.items()}

    draw(config.out, reasoner, problems, needles, stories, courses)
    write_page(config.out / "page.html", dense, problems, reasoner | {"Quest": quest})
    write_page(config.out / "stories.html", base, told, stories)
    numbers = {
        "totals": {name: float(summaries.total_ratio(found)[-1])
                   for name, found in stories.items()},
        "live_tokens": {name: float(found.live()[..., -1].mean())
                        for name, found in reasoner.items()},
        "ratios": {name: rounded(ratios(found)) for name, found in reasoner.items()},
        "stories": {name: rounded(ratios(found)) for name, found in stories.items()},
        "training": {
            name: {"targets": course.targets.tolist(), "measured": rounded(course.totals),
                   "heads": rounded(course.heads)}
            for name, course in courses.items()
        },
    }  # fmt: skip
    verdicts = report(reasoner, needles, stories, told.kinds, courses)
    results = provenance(config) | numbers | {"verdicts": [dataclasses.asdict(v) for v in verdicts]}
    write_json(config.out / "results.json", results)
    write_readme(config.out / "README.md", verdicts, results)
    for each in verdicts:
        print(f"{each.verdict}: {each.claim} {each.numbers}.")
    return results


def recorded(
    path: pathlib.Path, model: dms_jax.LanguageModel, texts: Texts, policy: Policy | None
) -> Retention:
    """Returns what the heads held of texts, from the file if it is of these texts and policy."""
    policy = model.policy if policy is None else policy
    key = json.dumps([policy.to_dict(), texts.tokens.tolist(), texts.prompts.tolist()])
    if path.exists():
        with np.load(path) as file:
            if str(file["key"]) == key:
                return Retention(
                    policy=policy,
                    tokens=texts.tokens,
                    prompt_lengths=texts.prompts,
                    gone=file["gone"],
                    reads=file.get("reads"),
                    num_query_heads=model.config.group_size,
                )
    found = retention(model, texts.tokens, policy=policy, prompt_lengths=texts.prompts)
    path.parent.mkdir(parents=True, exist_ok=True)
    if found.reads is None:
        np.savez_compressed(path, key=key, gone=found.gone)
    else:
        np.savez_compressed(path, key=key, gone=found.gone, reads=found.reads)
    print(f"{path.stem}: {found.live()[..., -1].mean():.1f} tokens a head at the end", flush=True)
    return found


def rounded(values: np.ndarray) -> Any:
    """Returns numbers as lists with three digits after the point."""
    return np.round(values, 3).tolist()


def draw(
    out: pathlib.Path,
    reasoner: dict[str, Retention],
    problems: Texts,
    needles: dict[str, Retention],
    stories: dict[str, Retention],
    courses: dict[str, OverTraining],
) -> None:
    """Draws the pictures."""
    ratio = Scale("times fewer tokens")
    by_head = {f"{name}, reasoner-11m": ratios(reasoner[name])
               for name in ("DMS", "AdaKV", "PyramidKV")}  # fmt: skip
    by_head |= {f"{name}, stories260K": ratios(found) for name, found in stories.items()}
    draw_maps(out / "ratios.png", by_head, ratio, title="Compression ratio of each head")
    maps = {
        f"{name}, aimed at {target:g}: {total:.2f} over all heads": heads
        for name, course in courses.items()
        for target, total, heads in zip(course.targets, course.totals, course.heads, strict=True)
    }
    draw_maps(out / "training.png", maps, ratio, title="stories260K over its retrofits", columns=3)

    def by_length(found: Retention) -> tuple[np.ndarray, np.ndarray]:
        return np.arange(1, found.length + 1), summaries.total_ratio(found)

    lengths = {
        "reasoner-11m, worked problems": {
            name: by_length(reasoner[name]) for name in ("DMS", "AdaKV", "TOVA", "StreamingLLM")
        },
        "reasoner-11m, needles in novels": {
            name: by_length(found) for name, found in needles.items()
        },
        "stories260K": {name: by_length(found) for name, found in stories.items()},
    }
    draw_lines(
        out / "length.png",
        lengths,
        Axes("tokens so far", "times fewer tokens", log_x=True),
        title="Compression ratio as texts grow",
    )
    distances = {
        name: (
            np.arange(1, found.length - 15),
            summaries.kept_by_distance(found).mean((0, 1))[1:-15],
        )
        for name, found in reasoner.items()
    }
    draw_lines(
        out / "distance.png",
        {"": distances},
        Axes("tokens further back than the query", "% of the heads that hold it", log_x=True,
             percent=True),
        title="What the heads of reasoner-11m hold, by distance (worked problems)",
    )  # fmt: skip
    learned = {
        "DMS, reasoner": reasoner["DMS"],
        "DMS, stories": stories["DMS"],
        "DMC, stories": stories["DMC"],
    }
    draw_lines(
        out / "position.png",
        {"": {name: gone_by_position(found) for name, found in learned.items()}},
        Axes("position in the text (bins of 32)", "% of the heads without it", percent=True),
        title=f"Tokens that are gone {DISTANCE} tokens later, by position",
    )
    occur = [kind for kind in KINDS if any(kind in one for one in problems.kinds)]
    kinds = [summaries.KINDS.index(kind) for kind in occur]
    names = [f"{layer}.{head}" for layer in range(8) for head in range(2)]
    prefers = {
        name: 100
        * summaries.specialisation(found, problems.kinds, distance=DISTANCE)[..., kinds].reshape(
            -1, len(kinds)
        )
        for name, found in reasoner.items()
        if name in ("DMS", "AdaKV", "H2O", "TOVA")
    }
    draw_maps(
        out / "kinds.png",
        prefers,
        Scale("points above the head's mean", "signed", digits=0, rows="layer.head",
              columns="kind of token", row_names=names, column_names=occur),
        title=f"Which kinds of tokens heads prefer to hold ({DISTANCE} tokens later)",
    )  # fmt: skip
    agree = {
        name: summaries.head_agreement(reasoner[name], distance=DISTANCE)
        for name in ("DMS", "AdaKV")
    }
    draw_maps(
        out / "agreement.png",
        agree,
        Scale("correlation", "signed", digits=1, rows="layer.head", columns="layer.head",
              row_names=names, column_names=names),
        title=f"Do two heads hold the same tokens ({DISTANCE} tokens later)?",
    )  # fmt: skip


def gone_by_position(found: Retention, width: int = 32) -> tuple[np.ndarray, np.ndarray]:
    """Returns the middle of each bin of positions, and the share of (head, text) without it."""
    gone = 1 - summaries.held_later(found, DISTANCE).mean((0, 1, 2))
    bins = len(gone) // width
    return width * (np.arange(bins) + 0.5), gone[: bins * width].reshape(bins, width).mean(1)


def write_page(
    path: pathlib.Path,
    model: dms_jax.LanguageModel,
    texts: Texts,
    found: dict[str, Retention],
) -> None:
    """Writes the page of the first text."""
    page = eviction_page(
        token_texts(model.tokenizer, texts.tokens[0].tolist()),
        [View.of(one, name) for name, one in found.items()],
        title="What the heads keep of a text",
        note="Each column is one policy on the same text, with its own number of tokens held.",
        prompt_length=int(texts.prompts[0]),
    )
    path.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
