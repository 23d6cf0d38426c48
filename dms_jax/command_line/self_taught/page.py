"""The page of a self-taught retrofit: its figures, its command, and where the result is."""

import shlex
from typing import Any

from dms_jax.command_line.reports import write_text
from dms_jax.command_line.self_taught.settings import SelfTaught
from dms_jax.evaluation.result import markdown_table, percent


def write_page(config: SelfTaught, results: dict[str, Any]) -> None:
    """Writes the page of a self-taught retrofit, README.md in its folder."""
    sections = [
        f"# {_name(config.model)} with DMS, taught by its own answers",
        _table(results),
        _legend(results),
        "The settings are in settings.json, all figures in results.json.",
        f"The command of the run:\n\n    {results['provenance']['command']}",
        f"The result:\n\n    {trial(config)}",
    ]
    write_text(config.out / "README.md", "\n\n".join(sections) + "\n")


def trial(config: SelfTaught) -> str:
    """Returns the command that tries the result."""
    result = str(config.out / "training" / "model")
    given = ["--model", config.model, "--adapter", result]
    if not config.adapter_only:
        given = ["--model", result]
    return f'dms-jax generate "..." {shlex.join(given)}'


def _name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _table(results: dict[str, Any]) -> str:
    judged = results["judge"] is not None
    columns = ["", "distillation", "loss", "peak", "", "live at the end", "reads", ""]
    if judged:
        columns += ["accuracy", "peak of answers", "ended"]
    rows = [columns]
    base = results["systems"]["vanilla"]
    for name, row in results["systems"].items():
        cells = [
            "the original" if name == "vanilla" else f"DMS, ratio {name}",
            f"{round(row['distillation'], 4) + 0:.4f}",  # no -0.0000
            f"{row['decoded_loss']:.4f}",
            f"{row['peak']:.1f}",
            f"÷ {base['peak'] / row['peak']:.2f}",
            f"{row['live']:.1f}",
            f"{row['reads']:,.0f}",
            f"÷ {base['reads'] / row['reads']:.2f}",
        ]
        if judged:
            answers = row["answers"]
            cells += [
                percent(answers["accuracy"]),
                f"{answers['peak']:.0f}",
                f"{answers['ended']:.0%}",
            ]
        rows.append(cells)
    return markdown_table(rows, numbers=True)


def _legend(results: dict[str, Any]) -> str:
    base, count = results["systems"]["vanilla"], results["lessons"]["held_out"]
    text = (
        f"On the original's own answers to {count} prompts that were held out, "
        f"{base['tokens']:.0f} tokens each with the prompt, read token by token from the cache. "
        "distillation: divergence from the original over the tokens of the answers, in nats a "
        "token; loss: of prompts and answers, in nats a token; peak: most live tokens; reads: "
        "entries attended to; the last three are averages over layers and heads."
    )
    if results["judge"] is not None:
        text += (
            f" accuracy: of greedy answers to these prompts, judged as {results['judge']}, in "
            "percent ± one standard error."
        )
    return text
