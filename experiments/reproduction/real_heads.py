"""How unevenly the heads of retrofitted real models hold tokens.

KVpop (arXiv 2607.05061) holds against DMS that a few of its heads keep nearly everything and the
others their window alone. Here each retrofit reads texts token by token through the paged cache
(`dms_jax.analysis.retention`), and what each head holds at the end is counted: beyond the window,
which no head gives up. Qwen2.5-Coder-0.5B reads answers that it gives itself, greedily, to test
problems of GSM8K; SmolLM2 reads RULER's needles; both read wikitext-2.

    python -m experiments.reproduction.real_heads --qwen q.gguf --qwen-adapter runs/adapter \
        --smollm2 s.gguf --data data

Writes heads.png, results.json and README.md.
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
from experiments.reproduction import summaries
from experiments.reproduction.files import table, wrap, write_text
from experiments.reproduction.head_pictures import Scale, draw_maps

NEAR_WHOLE = 0.9
NEEDLES = ("niah_single_1", "niah_single_2")
SMALL = "smollm2-135m-instruct-dms"
_TITLE = f"""# Which heads of real models hold their tokens

`python -m experiments.reproduction.real_heads --qwen qwen.gguf --qwen-adapter runs/adapter
--smollm2 smollm2.gguf --data data`: a retrofit of [real models](../real_models/README.md)
(Qwen2.5-Coder-0.5B, DMS to 3.3) and the
[one that ships](../../../dms_jax/assets/{SMALL}/README.md) (SmolLM2-135M, DMS to 4) read texts
token by token."""
_LEGEND = f"""
times fewer: tokens over live tokens at the end of the text, all heads together. kept: the share of
the tokens before the window that a head holds then, in the mean of all heads; of the head that
holds least and most; of the layer that holds least. held by the largest quarter: of all that is
held before the window, the part that is in a quarter of the heads. near empty: heads with less than
a tenth of the mean. near whole: heads that hold at least {NEAR_WHOLE:.0%}. two texts: the mean
correlation of the heads' log ratios in two texts.""".lstrip()


@dataclasses.dataclass(frozen=True)
class Config:
    """Count what each head of the retrofitted real models holds."""

    out: pathlib.Path = pathlib.Path("runs/real_heads")
    """Folder for heads.png, results.json and README.md."""
    qwen: str = ""
    """Qwen2.5-Coder-0.5B-Instruct: GGUF file, Hugging Face directory or hub id. Left out if not
    given."""
    smollm2: str = ""
    """SmolLM2-135M-Instruct, in any of these forms. Left out if not given."""
    qwen_adapter: pathlib.Path | None = None
    """Its retrofit, as `campaign` or `dms-jax retrofit self-taught` exports it."""
    smollm2_adapter: pathlib.Path | None = None
    """Its retrofit; the one that ships unless given."""
    data: pathlib.Path = pathlib.Path("data")
    """Folder with gsm8k/test.jsonl and text/wikitext-2/test.txt."""
    answers: int = 8
    """Answers of GSM8K, cut to one length with their questions."""
    answer_tokens: int = 256
    """Tokens of each question with its answer."""
    texts: int = 4
    """Pieces of wikitext-2, from all over it, and needles."""
    text_tokens: int = 1024
    """Tokens of each."""


def main(config: Config) -> None:
    """Reads the texts with each model, and writes the page."""
    make_folder("--out", config.out)
    if not (config.qwen or config.smollm2):
        raise dms_jax.ConfigError("give --qwen or --smollm2 or both.")
    if config.qwen and config.qwen_adapter is None:
        raise dms_jax.ConfigError("--qwen: give its retrofit too, --qwen-adapter DIR.")
    found: dict[str, Retention] = {}
    for name, path, adapter, own in (
        ("Qwen2.5-Coder-0.5B", config.qwen, config.qwen_adapter, answers),
        ("SmolLM2-135M", config.smollm2, config.smollm2_adapter or assets.path(SMALL), needles),
    ):
        if not path:
            continue
        model = dms_jax.load(path, adapter=adapter, merge=True, dtype="float32")
        for read in (own, pieces):
            held = found[f"{name}, {_TEXTS[read]}"] = retention(model, read(config, model))
            print(f"{name}, {_TEXTS[read]}: {held.live()[..., -1].mean():.1f} tokens a head")
    maps = {name.replace(", ", ",\n"): kept(held) for name, held in found.items()}
    title = "Share of the tokens before the window that each head holds"
    draw_maps(config.out / "heads.png", maps, Scale("share", "share", digits=2), title=title)
    figures = {name: figures_of(held) for name, held in found.items()}
    write_json(config.out / "results.json", provenance(config) | {"systems": figures})
    write_text(config.out / "README.md", wrap(page(figures)))


def answers(config: Config, model: LanguageModel) -> Int[np.ndarray, "B T"]:
    """Questions of GSM8K with the model's own greedy answers, the first that are long enough.

    Raises:
      DataError: there are not so many.
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
                f"{config.answers} were asked for; lower answer_tokens or answers."
            )
        asked += len(numbers)
        problems = [task.problem("test", number) for number in numbers]
        prompts = [encode_problem(model, each, chat, name=task.name) for each in problems]
        given = dms_jax.generate(model, prompts, sampling=sampling).completions
        whole = [[*prompt, *each.tokens] for prompt, each in zip(prompts, given, strict=True)]
        rows += [row[:length] for row in whole if len(row) >= length]
    return np.asarray(rows[: config.answers])


def pieces(config: Config, model: LanguageModel) -> Int[np.ndarray, "B T"]:
    """Pieces of wikitext-2's test text, at equal distances."""
    text = (config.data / "text" / "wikitext-2" / "test.txt").read_text(encoding="utf-8")
    tokens = np.asarray(model.tokenizer.encode(text, add_special_tokens=False))
    length = min(config.text_tokens, model.config.max_position_embeddings, len(tokens))
    starts = np.linspace(0, len(tokens) - length, config.texts).astype(int)
    return tokens[starts[:, None] + np.arange(length)]


def needles(config: Config, model: LanguageModel) -> Int[np.ndarray, "B T"]:
    """RULER's two needles, both as often, cut to one length."""
    rows = []
    for number in range(config.texts):
        task = RULER(NEEDLES[number % len(NEEDLES)], length=config.text_tokens)
        problem = fit_task(model, task).problem("test", number // len(NEEDLES))
        rows.append(encode_problem(model, problem, None, name=task.name))
    length = min(map(len, rows))
    return np.asarray([row[:length] for row in rows])


_TEXTS = {answers: "its answers to GSM8K", needles: "RULER's needles", pieces: "wikitext-2"}


def kept(held: Retention) -> Float[np.ndarray, "L K"]:
    """The share of the tokens before the window that each head holds at the end.

    # gone: [2, NEVER, NEVER, NEVER], window 1  Out: 2/3
    """
    before = held.length - held.policy.window  # pyright: ignore[reportAttributeAccessIssue]
    return held.seen_by(held.length - 1)[..., :before].mean((1, 3))


def figures_of(held: Retention) -> dict[str, Any]:
    """What is said of the heads that read a text."""
    shares = kept(held)
    return {
        "texts": len(held.tokens),
        "tokens": held.length,
        "policy": held.policy.to_dict(),
        "ratio": float(summaries.total_ratio(held)[-1]),
        "kept": float(shares.mean()),
        **spread(shares.tolist()),
        "near_whole": float((shares >= NEAR_WHOLE).mean()),
        "between": float(((shares >= 1 - NEAR_WHOLE) & (shares < NEAR_WHOLE)).mean()),
        "text_agreement": summaries.text_agreement(held),
        "heads": np.round(shares, 4).tolist(),
    }


def spread(kept: list[list[float]]) -> dict[str, float]:
    """Returns how unevenly heads keep: the least, the most, and what the largest quarter holds."""
    shares = np.sort(np.ravel(kept))
    quarter = max(1, len(shares) // 4)
    return {
        "least": float(shares[0]),
        "most": float(shares[-1]),
        "largest_quarter": float(shares[-quarter:].sum() / max(shares.sum(), 1e-9)),
        "near_empty": float((shares < 0.1 * shares.mean()).mean()),
        "least_layer": float(np.mean(kept, axis=1).min()),
    }


def page(figures: dict[str, dict[str, Any]]) -> str:
    """The text of README.md."""
    rows = []
    for name, own in figures.items():
        shares = [f"{own[each]:.2f}" for each in ("kept", "least", "most", "least_layer")]
        parts = [f"{own[each]:.0%}" for each in ("largest_quarter", "near_empty", "near_whole")]
        size = f"{own['texts']} x {own['tokens']:,}"
        agree = f"{own['text_agreement']:.2f}"
        rows.append([name, size, f"{own['ratio']:.2f}", *shares, *parts, agree])
    heads = ["", "texts", "times fewer", "kept", "least", "most", "least of a layer"]
    heads += ["held by the largest quarter", "near empty", "near whole", "two texts"]
    parts = [
        _TITLE,
        _verdict(figures),
        table(heads, rows),
        "![What each head holds](heads.png)",
        _LEGEND,
    ]
    return "\n\n".join(parts) + "\n"


def _verdict(figures: dict[str, dict[str, Any]]) -> str:
    """What it says of the argument against DMS."""
    between, quarters, whole = (
        [own[name] for own in figures.values()]
        for name in ("between", "largest_quarter", "near_whole")
    )
    told = "holds" if min(between) < 0.5 else "does not hold"
    return (
        "KVpop's argument against DMS is that a few of its heads keep nearly everything and the "
        f"others their window alone. Here it **{told}**: {_span(between)} of the heads hold "
        f"between a tenth and nine tenths of the tokens before the window, {_span(whole)} more. "
        "(It would hold if these were fewer than half of the heads for any text.) They are "
        f"uneven all the same: a quarter of them has {_span(quarters)} of all that is held."
    )


def _span(shares: list[float]) -> str:
    """In percent, from the least to the most.

    # In: [0.25, 0.5]  Out: "25 to 50%"
    """
    low, high = (f"{100 * each:.0f}" for each in (min(shares), max(shares)))
    return f"{low}%" if low == high else f"{low} to {high}%"


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
