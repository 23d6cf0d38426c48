"""The documentation: it builds without a warning, and what it tells readers to type works."""

import dataclasses
import importlib
import os
import pathlib
import re
import runpy
import shlex
import subprocess
import sys

import pytest

import dms_jax
from dms_jax.command_line import COMMANDS, main, policy_options, running
from dms_jax.policies import POLICIES
from tests.support.instances import nightly_but
from tests.test_architecture import ROOT

DOCS = ROOT / "experiments" / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> dict[str, str]:
    """The code blocks of a language, by page and number."""
    return {
        f"{path.relative_to(ROOT)}:{number}": text
        for path in PAGES
        for number, (kind, text) in enumerate(BLOCK.findall(path.read_text(encoding="utf-8")))
        if kind == language
    }


# What blocks and commands of a shipped reasoning model say, and what they run with here: answers of
# fewer tokens, to fewer problems, are of the same programs.
SHORTER = {
    "experiments/docs/pages/evaluating.md:1": {
        "problems=4": "problems=2",
        "max_new_tokens=192": "max_new_tokens=16",
    },
    "experiments/docs/pages/evaluating.md:3": {
        "lengths=(128, 192)": "lengths=(8, 16)",
        "problems=8": "problems=2",
    },
}
SHORTER_COMMANDS = {
    "experiments/docs/pages/evaluating.md:0": {
        "--problems 8": "--problems 2",
        "--max-new-tokens 256": "--max-new-tokens 16",
    }
}
# Options that name what a reader has, and the tests have not.
OF_OTHERS = {"--model", "--adapter"}
PYTHON, SHELL = blocks("python"), blocks("sh")
LINES = [
    (name, line.partition("#")[0].strip())
    for name, text in SHELL.items()
    for line in text.replace("\\\n", " ").splitlines()
    if line.partition("#")[0].strip()
]
# Several pages begin with the same commands.
LINES = [(name, line) for line, name in {line: name for name, line in reversed(LINES)}.items()]


def generates(line: str) -> bool:
    """Whether a command runs a model here, with no file of others."""
    words = shlex.split(line)
    return words[:1] == ["dms-jax"] and (
        words[1] in ("generate", "evaluate") and not OF_OTHERS & set(words)
    )


def shorter(text: str, changes: dict[str, str]) -> str:
    """Returns a block or a command with smaller numbers in it, each of which it has once."""
    for said, small in changes.items():
        assert text.count(said) == 1, said
        text = text.replace(said, small)
    return text


@pytest.fixture
def short_training(monkeypatch):
    """The recipe of the pages with few steps over short sequences, asked for as they ask."""
    whole = dms_jax.recipes.dms_quickstart

    def small(*given, **options):
        recipe = whole(*given, steps_per_ratio=2, **options)
        return dataclasses.replace(recipe, sequence_length=64)

    monkeypatch.setattr(dms_jax.recipes, "dms_quickstart", small)


def test_commands_and_code_need_no_scrolling():
    """In the width of a page of mkdocs-material; a longer command goes on behind a backslash."""
    texts = [text for kind in ("sh", "text") for text in blocks(kind).values()]
    texts += [text for name, text in PYTHON.items() if not name.startswith("README")]
    assert max(len(line) for text in texts for line in text.splitlines()) <= 84


@pytest.mark.parametrize("name", nightly_but({"README.md:1"}, PYTHON))
@pytest.mark.usefixtures("short_training")
def test_every_block_of_python_runs(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "block.py"
    path.write_text(shorter(PYTHON[name], SHORTER.get(name, {})), encoding="utf-8")
    runpy.run_path(str(path))


@pytest.mark.nightly
def test_names_in_blocks_need_no_import_but_the_library():
    """In this process other tests have imported all modules; in a reader's nothing has."""
    names = sorted(set(re.findall(r"(?<!from )\bdms_jax(?:\.\w+)+", "".join(PYTHON.values()))))
    assert "dms_jax.assets.path" in names
    done = subprocess.run(
        [sys.executable, "-c", "import dms_jax\n" + "\n".join(names)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.parametrize(
    ("name", "line"),
    nightly_but([one for one in LINES if one[0] == "README.md:2" or not generates(one[1])], LINES),
)
def test_every_command_is_understood(name, line, tmp_path, monkeypatch, capsys):
    """It runs where it takes seconds; else its options are parsed, or its target is there."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(shorter(line, SHORTER_COMMANDS.get(name, {})))
    match words:
        case ["dms-jax", *given] if generates(line) or given[0] == "policies":
            assert main(given) == 0
        case ["dms-jax", command, *_]:
            assert command in COMMANDS
            for left in filter(None, (re.fullmatch(r"[\w@.]+=(mine/.+)", word) for word in words)):
                pathlib.Path(left[1]).mkdir(parents=True, exist_ok=True)  # an earlier command did
            assert_options(command, words[2:])
        case [("python" | ".venv/bin/python"), "-m", module, *options]:
            assert module.startswith("experiments.")
            monkeypatch.setattr(sys, "argv", [module, *options])
            with pytest.raises(SystemExit) as end:
                runpy.run_module(module, run_name="__main__")
            assert end.value.code == 0
            assert options[-1] == "--help"
        case ["make", target, *variables]:
            call = ["make", "-n", target, *variables]
            subprocess.run(call, cwd=ROOT, check=True, capture_output=True, timeout=60)
        case ["pip", "install", what]:
            assert re.fullmatch(r"\.(\[[\w,]+\])?", what)  # extras: tests/test_packaging.py
        case _:
            pytest.fail(f"{name}: no test knows {line!r}")


def assert_options(command: str, options: list[str]) -> None:
    """Parses the options of a command, and runs nothing."""
    module = importlib.import_module(f"dms_jax.command_line.{command}")
    settings = getattr(module, "PRESETS", module.Config)
    parsed = []
    assert running.run(parsed.append, settings, description="", arguments=options) == 0
    assert len(parsed) == 1


def test_pages_have_every_policy():
    told = policy_options.markdown()
    assert (DOCS / "pages" / "policies.md").read_text().count("<!-- policies -->") == 1
    for policy in policy_options.described():
        assert f"### {policy.name}\n" in told


@pytest.mark.nightly
def test_it_builds_without_a_warning(tmp_path):
    config = ["--config-file", str(DOCS / "mkdocs.yml"), "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", *config],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site" / "policies" / "index.html").read_text()
    assert "number of recent queries that vote" in page
    reference = (tmp_path / "site" / "reference" / "policies" / "index.html").read_text()
    assert all(f'id="dms_jax.policies.{name}"' in reference for name in POLICIES)
    assert (tmp_path / "site" / "reference" / "generation" / "index.html").is_file()
