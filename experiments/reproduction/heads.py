"""Measures how unevenly the heads of retrofitted real models hold tokens.

KVpop (arXiv 2607.05061) states that under DMS a few heads keep nearly everything and the others
only their window. Here two retrofits read texts token by token through the paged cache; the script
counts the share of the tokens before the window that each head holds at the end. Every head keeps
the window. Qwen2.5-Coder-0.5B reads its own greedy answers to GSM8K, SmolLM2 reads RULER's needles,
and both read wikitext-2.

    python -m experiments.reproduction.heads --qwen q.gguf --qwen-adapter runs/adapter \
        --smollm2 s.gguf --data data

Writes data.json and heads.png, and prints the table of `experiments/results/heads`.
"""

import dataclasses
import pathlib
import sys
from typing import Any

import numpy as np
from jaxtyping import Float, Int

import dms_jax
from dms_jax import assets
from dms_jax.analysis import Retention, retention
from dms_jax.command_line.reports import make_folder, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.evaluation import Chat
from dms_jax.evaluation.prompting import encode_problem, fit_task
from dms_jax.evaluation.tasks import GSM8K, RULER
from dms_jax.model.language_model import LanguageModel

NEAR_WHOLE = 0.9
NEEDLES = ("niah_single_1", "niah_single_2")
COLUMNS = {  # columns of the table: figure -> format
    "texts": "",
    "tokens": ",",
    "ratio": ".2f",
    "kept": ".2f",
    "least": ".2f",
    "most": ".2f",
    "least_layer": ".2f",
    "largest_quarter": ".0%",
    "near_empty": ".0%",
    "near_whole": ".0%",
    "text_agreement": ".2f",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Count the tokens that each head of the retrofitted real models holds."""

    out: pathlib.Path = pathlib.Path("runs/heads")
    """Folder for data.json and heads.png."""
    qwen: str = ""
    """Qwen2.5-Coder-0.5B-Instruct: GGUF file, Hugging Face directory or hub id. Left out if not
    given."""
    smollm2: str = ""
    """SmolLM2-135M-Instruct, in any of these forms. Left out if not given."""
    qwen_adapter: pathlib.Path | None = None
    """Its retrofit, exported by `campaign` or `dms-jax retrofit self-taught`."""
    smollm2_adapter: pathlib.Path | None = None
    """Its retrofit; the one that ships unless given."""
    data: pathlib.Path = pathlib.Path("data")
    """Folder with gsm8k/test.jsonl and text/wikitext-2/test.txt."""
    answers: int = 8
    """Answers to GSM8K, with their questions, cut to one length."""
    answer_tokens: int = 256
    """Tokens of each question with its answer."""
    texts: int = 4
    """Number of equidistant pieces of wikitext-2, and of needles."""
    text_tokens: int = 1024
    """Tokens of each."""


def main(config: Config) -> None:
    """Reads the texts with each model; writes the figures and the picture, prints the table."""
    make_folder("--out", config.out)
    if not (config.qwen or config.smollm2):
        raise dms_jax.ConfigError("give --qwen or --smollm2 or both.")
    if config.qwen and config.qwen_adapter is None:
        raise dms_jax.ConfigError("--qwen: give its retrofit too, --qwen-adapter DIR.")
    small = config.smollm2_adapter or assets.path("smollm2-135m-instruct-dms")
    found: dict[str, Retention] = {}
    for name, path, adapter, texts in (
        (
            *("Qwen2.5-Coder-0.5B", config.qwen, config.qwen_adapter),
            {"its answers to GSM8K": answers, "wikitext-2": pieces},
        ),
        (
            *("SmolLM2-135M", config.smollm2, small),
            {"RULER's needles": needles, "wikitext-2": pieces},
        ),
    ):
        if path:
            model = dms_jax.load(path, adapter=adapter, merge=True, dtype="float32")
            for title, read in texts.items():
                found[f"{name}, {title}"] = retention(model, read(config, model))
    figures = {name: figures_of(held) for name, held in found.items()}
    write_json(config.out / "data.json", provenance(config) | {"systems": figures})
    draw(config.out / "heads.png", {name: kept(held) for name, held in found.items()})
    print("| |", " | ".join(COLUMNS), "|")
    print("|---" + "|---:" * len(COLUMNS) + "|")
    for name, own in figures.items():
        cells = [format(own[column], form) for column, form in COLUMNS.items()]
        print(f"| {name} |", " | ".join(cells), "|")


def answers(config: Config, model: LanguageModel) -> Int[np.ndarray, "B T"]:
    """Returns questions of GSM8K with the model's own greedy answers, the first of full length.

    Raises:
      DataError: too few answers are that long.
    """
    length, rows, asked = config.answer_tokens, [], 0
    task = GSM8K(path=config.data / "gsm8k" / "test.jsonl", style="boxed")
    chat = Chat() if getattr(model.tokenizer, "chat_template", None) else None
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=length)
    while len(rows) < config.answers:
        numbers = range(asked, min(asked + 2 * config.answers, len(task.records)))
        if not numbers:
            raise dms_jax.DataError(
                f"{len(rows)} answers to GSM8K have {length} tokens with their questions, and "
                f"{config.answers} were asked for; lower --answer-tokens or --answers."
            )
        asked += len(numbers)
        problems = [task.problem("test", number) for number in numbers]
        prompts = [encode_problem(model, each, chat, name=task.name) for each in problems]
        given = dms_jax.generate(model, prompts, sampling=sampling).completions
        whole = [[*prompt, *each.tokens] for prompt, each in zip(prompts, given, strict=True)]
        rows += [row[:length] for row in whole if len(row) >= length]
    return np.asarray(rows[: config.answers])


def pieces(config: Config, model: LanguageModel) -> Int[np.ndarray, "B T"]:
    """Returns equidistant pieces of wikitext-2's test text."""
    text = (config.data / "text" / "wikitext-2" / "test.txt").read_text(encoding="utf-8")
    tokens = np.asarray(model.tokenizer.encode(text, add_special_tokens=False))
    length = min(config.text_tokens, model.config.max_position_embeddings, len(tokens))
    starts = np.linspace(0, len(tokens) - length, config.texts).astype(int)
    return tokens[starts[:, None] + np.arange(length)]


def needles(config: Config, model: LanguageModel) -> Int[np.ndarray, "B T"]:
    """Returns RULER's two easiest needles in turn, cut to one length."""
    rows = []
    for number in range(config.texts):
        task = RULER(NEEDLES[number % len(NEEDLES)], length=config.text_tokens)
        problem = fit_task(model, task).problem("test", number // len(NEEDLES))
        rows.append(encode_problem(model, problem, None, name=task.name))
    length = min(map(len, rows))
    return np.asarray([row[:length] for row in rows])


def kept(held: Retention) -> Float[np.ndarray, "L K"]:
    """Returns the share of the tokens before the window that each head holds at the end.

    # gone: [2, NEVER, NEVER, NEVER], window 1  Out: 2/3
    """
    before = held.length - held.policy.window  # pyright: ignore[reportAttributeAccessIssue]
    return held.seen_by(held.length - 1)[..., :before].mean((1, 3))


def figures_of(held: Retention) -> dict[str, Any]:
    """Returns figures of how evenly heads keep tokens.

    - ratio: tokens over live tokens at the end, all heads together.
    - kept: mean of the heads' shares; least, most, least_layer: of a head, of a layer.
    - largest_quarter: the share of all live tokens before the window in a quarter of the heads.
    - near_empty: share of heads with less than a tenth of the mean; near_whole: with at least 90%;
      between: with 10 to 90%.
    - text_agreement: see `text_agreement`.
    """
    shares = kept(held)
    order = np.sort(shares, axis=None)
    quarter = max(1, len(order) // 4)
    return {
        "texts": len(held.tokens),
        "tokens": held.length,
        "policy": held.policy.to_dict(),
        "ratio": float(held.length / held.live()[..., -1].mean()),
        "kept": float(shares.mean()),
        "least": float(order[0]),
        "most": float(order[-1]),
        "least_layer": float(shares.mean(1).min()),
        "largest_quarter": float(order[-quarter:].sum() / max(order.sum(), 1e-9)),
        "near_empty": float((shares < 0.1 * shares.mean()).mean()),
        "near_whole": float((shares >= NEAR_WHOLE).mean()),
        "between": float(((shares >= 1 - NEAR_WHOLE) & (shares < NEAR_WHOLE)).mean()),
        "text_agreement": text_agreement(held),
        "heads": np.round(shares, 4).tolist(),
    }


def text_agreement(held: Retention) -> float:
    """Returns the agreement of the heads' ratios in two texts: the mean correlation of their logs.

    1 if the heads that compress most are the same in all texts, 0 if the text decides; NaN for a
    single text.
    """
    ratios = np.log(held.length / held.live()[..., -1])  # [L, B, K]
    texts = np.moveaxis(ratios, 1, 0).reshape(ratios.shape[1], -1)
    pairs = np.atleast_2d(np.corrcoef(texts))[np.triu_indices(len(texts), 1)]
    return float(pairs.mean()) if len(pairs) else float("nan")


def draw(path: pathlib.Path, maps: dict[str, Float[np.ndarray, "L K"]]) -> None:
    """Draws the share that each head keeps, one panel per model and text."""
    from matplotlib.figure import Figure

    layers, heads = np.max([shares.shape for shares in maps.values()], axis=0)
    size = (len(maps) * (0.62 * heads + 1.2), 0.34 * layers + 1.6)
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    figure.suptitle("Share of the tokens before the window that each head holds")
    panels = figure.subplots(1, len(maps), squeeze=False)[0]
    images = []
    for axes, (name, shares) in zip(panels, maps.items(), strict=True):
        images.append(axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, aspect="auto"))
        for (layer, head), share in np.ndenumerate(shares):
            colour = "black" if share > 0.5 else "white"
            axes.text(head, layer, f"{share:.2f}", ha="center", va="center", color=colour, size=8)
        axes.set_title(name.replace(", ", ",\n"), fontsize=10)
        axes.set_xticks(range(shares.shape[1]))
        axes.set_yticks(range(shares.shape[0]))
        axes.set_xlabel("KV head")
    panels[0].set_ylabel("layer")
    figure.colorbar(images[0], ax=list(panels), label="share")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
