"""What holds for every script: how it is called, how it ends, and where it writes."""

import ast
import dataclasses
import importlib
import pathlib
import runpy
import sys

import pytest

import dms_jax
from dms_jax.command_line import COMMANDS, running

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts): path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "experiments").rglob("*.py"))
}
SCRIPTS = [name for name, text in SOURCES.items() if '__name__ == "__main__"' in text]


def imports(text: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module)
    return names


def ended(name, monkeypatch, *arguments) -> int:
    """Runs a script as `python -m` does; its exit status."""
    monkeypatch.delitem(sys.modules, name, raising=False)  # as if it were not imported yet
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(name, run_name="__main__")
    return end.value.code


def settings(name):
    """The settings that a script has by itself, and their dataclass."""
    module = importlib.import_module(name)
    try:
        return [module.Config()], module.Config
    except TypeError:  # some are required
        return [], module.Config


def test_what_is_in_the_wheel_has_no_second_version_here():
    in_front = {name.split(".")[1] for name in SCRIPTS if name.count(".") == 1}
    assert in_front == {"pretrain"}
    assert not in_front & COMMANDS.keys()
    assert len(SCRIPTS) > 20


def test_there_is_one_way_of_options_and_no_path_is_changed():
    for name, text in SOURCES.items():
        assert "sys.path" not in text, name
        assert "argparse" not in imports(text), name
        for module in imports(text):
            if module.split(".")[0] == "experiments":
                assert module in {"experiments", *SOURCES} or f"{module}.__init__" in SOURCES


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_names_every_option_and_the_command(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(running, "running_program", lambda: f"python -m {name}")
    assert ended(name, monkeypatch, "--help") == 0
    shown = capsys.readouterr().out
    assert f"usage: python -m {name}" in shown
    _, config = settings(name)
    for field in dataclasses.fields(config):
        if "Positional" not in str(field.type):
            assert f"-{field.name.replace('_', '-')}" in shown


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_option_that_there_is_none_of_ends_with_2(name, monkeypatch, capsys):
    assert ended(name, monkeypatch, "--no-such-option", "1") == 2
    said = capsys.readouterr()
    assert "no-such-option" in said.err
    assert "Traceback" not in said.err
    assert said.out == ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_what_cannot_be_written_or_timed_ends_with_2(name, monkeypatch, capsys, tmp_path):
    """A folder below a file is none; kernels are timed on a GPU alone."""
    configs, config = settings(name)
    names = {field.name for field in dataclasses.fields(config)}
    if "out" not in names:  # then it has no other place to write to
        assert not names & {"pages", "save", "pack"}
        return
    (tmp_path / "file").touch()
    more = []
    for field in dataclasses.fields(config):
        if not configs and field.default is dataclasses.MISSING and field.name != "out":
            more += [f"--{field.name}", str(tmp_path / "file")]
    monkeypatch.setattr(dms_jax, "retrofit", lambda *args, **more: pytest.fail("it went on"))
    out = tmp_path / "file" / "out"
    assert ended(name, monkeypatch, *more, "--out", str(out)) == 2
    said = capsys.readouterr().err
    assert "Error: " in said
    assert "Traceback" not in said
    assert "--out" in said or "sees no GPU" in said


@pytest.mark.parametrize("name", SCRIPTS)
def test_committed_results_are_written_over_only_if_told(name):
    configs, _ = settings(name)
    for config in configs:
        for field in ("out", "pages", "save", "pack"):
            path = getattr(config, field, None)
            assert path is None or path.parts[0] == "runs", f"{name} writes to {path}"


def test_readme_has_a_line_for_every_script():
    readme = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    for name in SCRIPTS:
        short = name.removeprefix("experiments.").rpartition(".")[2]
        assert readme.count(f"\n| `{short}` |") == 1, short
