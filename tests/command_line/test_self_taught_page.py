"""The page of a self-taught retrofit: its commands run, with the settings of the run."""

import dataclasses
import pathlib
import shlex
from typing import Any

from dms_jax.command_line import evaluate, generate
from dms_jax.command_line.running import run
from dms_jax.command_line.self_taught.page import commands
from dms_jax.command_line.self_taught.settings import PRESETS

_, CUSTOM = PRESETS["self-taught"]
ASKED = dataclasses.replace(CUSTOM, model="m.gguf", out=pathlib.Path("runs/x"), max_new_tokens=300)
PROGRAMS = {"generate": generate.Config, "evaluate": evaluate.Config}


def results(**changes: Any) -> dict[str, Any]:
    """The figures of a run from which the commands are made."""
    ran = {"provenance": {"command": "dms-jax retrofit self-taught"}}
    return ran | {"judge": "gsm8k", "style": "boxed", "chat": True} | changes


def called(config, figures: dict[str, Any]) -> dict[str, Any]:
    """The parsed settings of each command of the page."""
    seen: dict[str, Any] = {}
    for _, command in commands(config, figures):
        words = shlex.split(command)
        if words[0] == "dms-jax" and (settings := PROGRAMS.get(words[1])):
            given: list[Any] = []
            assert run(given.append, settings, description="", arguments=words[2:]) == 0
            (seen[words[1]],) = given
    return seen


def test_page_commands_ask_as_in_training():
    config = dataclasses.replace(
        ASKED, system="Be brief.", template=("enable_thinking=false", "a=1"), dtype="bfloat16"
    )
    found = called(config, results())
    measured, tried = found["evaluate"], found["generate"]
    assert (measured.task, measured.temperature, measured.max_new_tokens) == ("gsm8k", 0, 300)
    assert measured.task_options == ("path=test.jsonl", "style=boxed")
    assert (measured.chat, measured.system) == (True, "Be brief.")
    assert (tried.chat, tried.prompts) == (True, ("Why is the sky blue?",))
    for each in (measured, tried):
        assert (each.model, each.adapter) == ("m.gguf", "runs/x/training/model")
        assert (each.dtype, each.template) == ("bfloat16", ("enable_thinking=false", "a=1"))


def test_page_commands_without_chat_or_adapter():
    plain = called(ASKED, results(chat=False, style="plain"))
    assert plain["evaluate"].task_options == ("path=test.jsonl", "style=plain")
    assert not plain["evaluate"].chat
    assert (plain["generate"].chat, plain["generate"].plain) == (False, True)
    assert plain["generate"].prompts == ("Once upon a time",)
    whole = called(dataclasses.replace(ASKED, trainable="all"), results(judge=None, style=None))
    assert list(whole) == ["generate"]
    of_base = [command for what, command in commands(ASKED, results(judge=None)) if "whole" in what]
    ((_, _, code),) = map(shlex.split, of_base)
    assert code.startswith('import dms_jax; m = dms_jax.load("m.gguf", adapter="runs/x/training')
    assert of_base == [f"python -c '{code}'"]
    assert (whole["generate"].model, whole["generate"].adapter) == ("runs/x/training/model", None)
