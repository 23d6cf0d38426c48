"""The rules of the house that a machine can check: imports, files, calls, comparisons."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import jaxtyping
import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
LONGEST_FILE = 420
LONGEST_IMPORT_SECONDS = 2.0
# Comparisons that chex replaces: its assertions take whole trees, and name the leaf that differs.
BARE_COMPARISONS = {"testing", "allclose", "array_equal", "array_equiv"}
MOST_PARAMETERS = 8
HEAVY_PACKAGES = {"orbax", "grain", "matplotlib", "transformers", "torch"}

# From the bottom up. A module may import modules of earlier lines, its own package, and
# `pallas_kernels`; modules on one line may not import each other.
IMPORT_ORDER = """
errors
checks
assets compilation config_checks devices helper_process json_text processes ranking terminal
config sharding
cache
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


# Files with functions over many arrays or sizes, `evaluate` and `hyperscale`.
LONG_PARAMETER_LISTS = {
    "dms_jax/evaluation/evaluating.py",
    "dms_jax/evaluation/hyperscaling.py",
    "dms_jax/generation/memory.py",
    "dms_jax/generation/programs.py",
    "dms_jax/model/caching.py",
    "dms_jax/model/transformer.py",
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


def import_order_violations(path: Path) -> list[str]:
    own = path.relative_to(ROOT / "dms_jax").with_suffix("").parts[0]
    if own == "__init__":
        return []
    if own not in RANKS:
        return [f"{path.relative_to(ROOT)}: dms_jax.{own} has no place in the import order"]
    here = path.relative_to(ROOT)
    modules = {tuple(name.split(".")[:2]) for name in imported_modules(path)}
    violations = []
    for head, *rest in sorted(modules):
        if head in ("experiments", "tests", "colab"):
            violations.append(f"{here} imports {head}")
        elif head == "dms_jax":
            target = rest[0] if rest else "itself"
            if (own, target) == ("command_line", "itself"):
                continue  # commands use the library as its users do
            if target not in RANKS:
                violations.append(f"{here}: dms_jax.{target} has no place in the import order")
            elif target != own and RANKS[target] >= RANKS[own]:
                violations.append(f"{here} imports dms_jax.{target}, which is not below it")
    return violations


def test_imports_run_one_way():
    violations = [
        line for path in python_files("dms_jax") for line in import_order_violations(path)
    ]
    assert not violations, "\n".join(violations)


def test_pallas_kernels_stand_alone():
    violations = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in python_files("pallas_kernels")
        for name in sorted(imported_modules(path))
        if name.split(".")[0] in ("dms_jax", "experiments", "tests")
    ]
    assert not violations, "\n".join(violations)


def test_the_checks_see_a_forbidden_import(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    module = tmp_path / "dms_jax" / "cache" / "pool.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "import experiments.quickstart\nfrom ..policies import base\nfrom . import accounting\n"
        "from dms_jax import config\nfrom dms_jax.cache.accounting import reads\n"
    )
    assert import_order_violations(module) == [
        "dms_jax/cache/pool.py imports dms_jax.policies, which is not below it",
        "dms_jax/cache/pool.py imports experiments",
    ]


def bare_comparisons(path: Path) -> list[str]:
    """Uses of NumPy's and jax.numpy's comparisons in a test module, as `file:line uses name`."""
    here = path.relative_to(ROOT)
    violations = []
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Attribute):
            names = [(ast.unparse(node.value), node.attr)]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [tuple(alias.name.rsplit(".", 1)) for alias in node.names if "." in alias.name]
        violations += [
            f"{here}:{node.lineno} uses {module}.{name} instead of chex"
            for module, name in names
            if name in BARE_COMPARISONS and module in ("np", "numpy", "jnp", "jax.numpy")
        ]
    return violations


def test_arrays_are_compared_through_chex():
    modules = python_files("tests")
    violations = [line for path in modules for line in bare_comparisons(path)]
    assert modules
    assert not violations, "\n".join(violations)


def test_the_check_sees_a_bare_comparison(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    module = tmp_path / "test_sums.py"
    module.write_text(
        "import numpy.testing\nfrom numpy import allclose\nfrom jax.numpy import sum\n"
        "np.testing.assert_array_equal(1, 1)\nassert jnp.array_equal(1, 1)\n"
        "chex.assert_trees_all_close(1, 1)\n"
    )
    assert sorted(bare_comparisons(module)) == [
        "test_sums.py:1 uses numpy.testing instead of chex",
        "test_sums.py:2 uses numpy.allclose instead of chex",
        "test_sums.py:4 uses np.testing instead of chex",
        "test_sums.py:5 uses jnp.array_equal instead of chex",
    ]


@pytest.mark.parametrize("package", ["dms_jax", "pallas_kernels", "experiments", "tests"])
def test_files_hold_one_idea(package):
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in python_files(package)
    }
    too_long = {name: lines for name, lines in lengths.items() if lines > LONGEST_FILE}
    assert lengths, f"{package} holds no Python file"
    assert not too_long


def long_parameter_lists(path: Path) -> list[str]:
    """Returns the functions of a file that take too many parameters."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            names = [each.arg for each in arguments if each.arg not in ("self", "cls")]
            if len(names) > MOST_PARAMETERS:
                found.append(f"{path.relative_to(ROOT)}: {node.name} takes {len(names)}")
    return found


def test_calls_are_short():
    long = [
        line
        for path in python_files("dms_jax")
        if str(path.relative_to(ROOT)) not in LONG_PARAMETER_LISTS
        for line in long_parameter_lists(path)
    ]
    assert not long, "\n".join(long)


def figures_past_json_text(path: Path) -> list[str]:
    """Laid-out JSON that a file writes by itself, and with it NaN, which is not JSON."""
    return [
        f"{path.relative_to(ROOT)}:{node.lineno} calls json.dumps, not json_text"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "json.dumps"
        and any(each.arg == "indent" for each in node.keywords)
    ]


def test_figures_are_written_in_one_way():
    """Configurations and indices of checkpoints (`dms_jax/checkpoint`) hold none."""
    files = [
        path
        for package in ("dms_jax", "experiments")
        for path in python_files(package)
        if not {"checkpoint", "assets"} & set(path.relative_to(ROOT).parts)
        and path.name not in ("json_text.py", "checkpoints.py")
    ]
    violations = [line for path in files for line in figures_past_json_text(path)]
    assert not violations, "\n".join(violations)


def test_committed_figures_are_json():
    def refuse(word):
        raise ValueError(f"{word} is not JSON")

    results = sorted((ROOT / "experiments" / "results").rglob("*.json"))
    assert results
    for path in results:
        json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def import_seconds(modules: str) -> tuple[float, str]:
    """Returns the processor seconds of an import, and the heavy packages that it imports."""
    script = (
        f"import sys, time; start = time.process_time(); import {modules}; "
        "print(time.process_time() - start); "
        f"print(sorted({HEAVY_PACKAGES} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    seconds, heavy = done.stdout.splitlines()
    return float(seconds), heavy


def test_import_is_quick_and_light():
    """Under two seconds, or hardly longer than jax, flax and optax on the same busy cores."""
    ours = dependencies = float("inf")
    quick = False
    for _ in range(5):  # the best of a few: the other workers of the run share the cores
        seconds, heavy = import_seconds("dms_jax")
        assert heavy == "[]", f"import dms_jax also imports {heavy}"
        ours = min(ours, seconds)
        dependencies = min(dependencies, import_seconds("jax, flax.nnx, optax")[0])
        quick = ours < LONGEST_IMPORT_SECONDS or ours < 1.4 * dependencies
        if quick:
            break
    assert quick


def test_annotations_are_checked_while_the_tests_run():
    from pallas_kernels import decode_attention

    q = np.zeros((2, 1, 4), np.float32)
    pages = np.zeros((3, 2, 4), np.float32)
    with pytest.raises(jaxtyping.TypeCheckError, match="lengths"):
        decode_attention(
            q, pages, pages, np.zeros((2, 2), np.int32), np.zeros(5, np.int32), scale=1.0
        )
