"""All stages of a self-taught retrofit, in one directory.

out/
  settings.json    the settings; a call with others is refused
  answers/         the journal of sampled answers
  lessons.jsonl    the answers that are trained on, as token ids; lessons.json counts them
  training/        the run: checkpoints, log.jsonl, snapshots/ at each ratio, model/
  measured/        the figures of the base and of each export, one file each
  results.json     all figures together
  README.md        the page
"""

import json
from typing import Any

import dms_jax
from dms_jax.command_line.reports import (
    make_folder,
    provenance,
    read_file,
    write_json,
)
from dms_jax.command_line.retrofitting import check_window
from dms_jax.command_line.self_taught.answering import Lessons, choose, sample
from dms_jax.command_line.self_taught.measuring import BASE, HeldOut, measure
from dms_jax.command_line.self_taught.page import trial, write_page
from dms_jax.command_line.self_taught.questions import read_prompts, read_questions
from dms_jax.command_line.self_taught.settings import SelfTaught
from dms_jax.data import Documents
from dms_jax.model.language_model import LanguageModel


def self_taught(config: SelfTaught) -> dict[str, Any]:
    """Runs the unfinished stages, and returns the figures.

    Raises:
      ConfigError: a setting is invalid, or the directory holds a run with other settings.
      DataError: the prompts cannot be used, or no answer is left to train on.
    """
    if not config.model or config.prompts is None:
        raise dms_jax.ConfigError(
            "give --model and --prompts, or a preset that has both: "
            "dms-jax retrofit self-taught-stories260k."
        )
    recipe, policy = config.make_recipe(), config.make_policy()
    check_window(policy, recipe)
    records = read_prompts(config)
    make_folder("--out", config.out)
    _check_settings(config)
    base = config.load()
    positions = base.config.max_position_embeddings
    if recipe.sequence_length > positions:  # fail before hours of sampling
        raise dms_jax.ConfigError(
            f"--sequence-length {recipe.sequence_length} is beyond the {positions} positions "
            f"of --model {config.model}: give no more."
        )
    questions = read_questions(config, base, records)
    write_json(config.out / "settings.json", config.to_dict())  # after all checks
    answers = sample(config, base, questions, config.out / "answers")
    lessons = choose(config, questions, answers, config.out)
    held_out = HeldOut(config, base, lessons.held_out)
    print(
        f"--keep {config.keep}: {lessons.figures['kept']} of {lessons.figures['sampled']} answers, "
        f"{lessons.figures['tokens']:,} tokens in all",
        flush=True,
    )
    train(config, base, lessons, held_out)
    folder = config.out / "measured"
    make_folder("--out", folder)
    told = (questions, lessons, held_out, folder)
    systems = {BASE: measure(config, base, *told, BASE)}
    for ratio in sorted(config.ratios):
        name = f"{ratio:g}"
        if not (folder / f"{name}.json").exists():
            measure(config, exported(config, name), *told, name)
        systems[name] = json.loads(read_file("--out", folder / f"{name}.json"))
    results = {
        "provenance": provenance(config),
        "prompts": questions.fingerprint,
        "judge": None if questions.task is None else questions.task.name,
        "style": None if questions.task is None else questions.task.style,
        "chat": questions.chat is not None,
        "lessons": lessons.figures,
        "steps": recipe.total_steps(policy),
        "systems": systems,
    }
    write_json(config.out / "results.json", results)
    write_page(config, results)
    print(f"The measurements are in {config.out / 'README.md'}. The result:\n\n    {trial(config)}")
    return results


def train(config: SelfTaught, base: LanguageModel, lessons: Lessons, held_out: HeldOut) -> None:
    """Starts or resumes the retrofit, unless it is done."""
    out = config.out / "training"
    if (out / "model").exists():
        return
    dms_jax.retrofit(
        base,
        config.make_policy(),
        recipe=config.make_recipe(),
        data=Documents(lessons.training),
        out=out,
        seed=config.seed,
        adapter_only=config.adapter_only,
        checkpoint_every=config.checkpoint_every,
        evaluate=held_out,
        evaluate_every=config.evaluate_every,
    )


def exported(config: SelfTaught, ratio: str) -> LanguageModel:
    """Loads the model exported at a ratio; for the last one, the final model."""
    path = config.out / "training" / "snapshots" / ratio
    if float(ratio) == max(config.ratios):
        path = config.out / "training" / "model"
    return config.load(adapter=path) if config.adapter_only else dms_jax.load(path)


def _check_settings(config: SelfTaught) -> None:
    """Raises ConfigError if the directory holds a run with other settings."""
    file, settings = config.out / "settings.json", config.to_dict()
    if not file.exists():
        return
    there = json.loads(read_file("--out", file))
    differ = [
        f"--{name.replace('_', '-')} {there.get(name)}, not {settings.get(name)}"
        for name in sorted(there.keys() | settings.keys())
        if there.get(name) != settings.get(name)
    ]
    if differ:
        raise dms_jax.ConfigError(
            f"--out {config.out} holds a run with {', '.join(differ)}. Give the same to resume "
            "it, or another directory."
        )
