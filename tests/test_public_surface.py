"""What an installed dms_jax offers: names, version, types, and warnings that name the caller."""

import ast
import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import dms_jax
from tests.test_architecture import ROOT, python_files

NAME = re.compile(r"\bdms_jax(?:\.[A-Za-z_]+)+")

# Runs without the import hook of the tests, so that warnings name the real caller, and as if
# dms_jax were not installed.
CALLER = """
import importlib.metadata
import warnings

real = importlib.metadata.distribution


def without_us(name):
    if name == "dms-jax":
        raise importlib.metadata.PackageNotFoundError(name)
    return real(name)


importlib.metadata.distribution = without_us

import dms_jax
from dms_jax import assets

model = dms_jax.load(assets.path("stories260k"))
policy = dms_jax.DMS(window=8)
sampling = dms_jax.Sampling(max_new_tokens=1)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    model.logits([[1, 2]], policy=policy)  # warns
    dms_jax.generate(model, [[1, 2]], policy=policy, sampling=sampling)  # warns
    dms_jax.score(model, [[1, 2]], policy=policy)  # warns
    model.resolve_policy(policy)  # warns
print(dms_jax.__version__)
for one in caught:
    print(one.filename, one.lineno)
"""


def names_in_text(path: Path) -> set[str]:
    """Returns the dotted names of dms_jax in the messages and docstrings of a file."""
    strings = (
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    return {name for text in strings for name in NAME.findall(text)}


def test_what_messages_name_is_there():
    names = {name for path in python_files("dms_jax") for name in names_in_text(path)}
    assert "dms_jax.DMS" in names
    missing = []
    for name in sorted(names):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            missing.append(name)
    assert not missing


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("evaluate", "evaluation"),
        ("hyperscale", "evaluation"),
        ("Recipe", "training"),
        ("Policy", "policies"),
        ("Device", "devices"),
    ],
)
def test_what_users_need_is_exported(name, home):
    assert name in dms_jax.__all__
    assert getattr(dms_jax, name) is getattr(importlib.import_module(f"dms_jax.{home}"), name)


def test_all_names_what_is_there_once():
    assert all(hasattr(dms_jax, name) for name in dms_jax.__all__)
    assert len(set(dms_jax.__all__)) == len(dms_jax.__all__)


def test_the_version_is_that_of_the_package():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert dms_jax.__version__ == importlib.metadata.version("dms-jax") == declared


@pytest.fixture(scope="module")
def caller(tmp_path_factory) -> tuple[Path, list[str]]:
    """A script of a user beside a checkout that is not installed, and the lines that it prints."""
    script = tmp_path_factory.mktemp("caller") / "caller.py"
    script.write_text(CALLER)
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return script, done.stdout.splitlines()


@pytest.mark.nightly
def test_a_checkout_that_is_not_installed_has_a_version_too(caller):
    assert caller[1][0] == "0+checkout"


@pytest.mark.nightly
def test_warnings_blame_the_line_of_the_caller(caller):
    script, printed = caller
    blamed = {(name, int(line)) for name, line in map(str.split, printed[1:])}
    lines = [number for number, line in enumerate(CALLER.splitlines(), 1) if "# warns" in line]
    assert blamed == {(str(script), line) for line in lines}
