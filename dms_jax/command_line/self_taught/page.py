"""The page of a self-taught retrofit: the figures, and the commands."""

import json
import shlex
from typing import Any

from dms_jax.command_line.options import SHIPPED
from dms_jax.command_line.reports import write_text
from dms_jax.command_line.self_taught.settings import SelfTaught
from dms_jax.evaluation import percent


def write_page(config: SelfTaught, results: dict[str, Any]) -> None:
    """Writes the page of a self-taught retrofit, README.md in its folder."""
    sections = [
        f"# {_name(config.model)} with DMS, taught by its own answers",
        _table(results),
        _legend(results),
        "The settings are in settings.json, all figures in results.json.",
        "## Commands",
        *(f"{what}:\n\n    {command}" for what, command in commands(config, results)),
    ]
    write_text(config.out / "README.md", "\n\n".join(sections) + "\n")


def commands(config: SelfTaught, results: dict[str, Any]) -> list[tuple[str, str]]:
    """Returns commands that repeat the run, try the result, and measure or merge it."""
    result = str(config.out / "training" / "model")
    of_model = ["--model", config.model, "--adapter", result]
    if not config.adapter_only:
        of_model = ["--model", result]
    if config.dtype is not None:
        of_model += ["--dtype", config.dtype]
    chat, system = [], []
    asks = ["--plain"]  # the default of `generate` is a chat if the checkpoint has one
    if results["chat"]:
        asks = chat = ["--chat", *(["--template", *config.template] if config.template else [])]
        system = [] if config.system is None else ["--system", config.system]
    start = "Why is the sky blue?" if chat else "Once upon a time"
    try_it = ["dms-jax", "generate", start, *of_model, *asks]
    found = [
        ("The same run, or the rest of it", results["provenance"]["command"]),
        ("An answer from the small cache", shlex.join(try_it)),
    ]
    if results["judge"] is not None:
        options = ["path=test.jsonl", f"style={results['style']}"]
        asked = ["--task", results["judge"], "--task-options", *options, *chat, *system]
        answered = ["--temperature", "0", "--max-new-tokens", str(config.max_new_tokens)]
        measured = ["dms-jax", "evaluate", *of_model, *asked, *answered]
        found.append(("Accuracy on a file of problems of its own", shlex.join(measured)))
    elif config.adapter_only:
        base = json.dumps(config.model)  # double quotes, as the shell takes single ones
        base = f"dms_jax.assets.path({base})" if config.model in SHIPPED else base
        whole = (
            f"import dms_jax; m = dms_jax.load({base}, adapter={json.dumps(result)}, merge=True); "
            'dms_jax.save(m, m.policy, "whole")'
        )
        found.append(("A whole checkpoint", shlex.join(["python", "-c", whole])))
    return found


def _name(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2]


def _table(results: dict[str, Any]) -> str:
    judged = results["judge"] is not None
    columns = ["", "distillation", "loss", "peak", "", "live at the end", "reads", ""]
    if judged:
        columns += ["accuracy", "peak of answers", "ended"]
    lines = ["| " + " | ".join(columns) + " |", "|---" + "|---:" * (len(columns) - 1) + "|"]
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
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


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
