"""The notebooks run from an empty folder with the wheel of this checkout, and show their results.

Each notebook has two files: a script (py:percent) to edit, and the notebook that `make notebooks`
writes from it.
"""

import base64
import io
import os
import pathlib
import re
import subprocess
import sys
import types
import zipfile

import jupytext
import nbclient
import nbformat
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[2]
COLAB = ROOT / "colab"
SCRIPTS = sorted(COLAB.glob("*.py"))
# Small settings, a text that the run prints, and its number of figures.
RUNS = {
    "quickstart": (dict(PROBLEMS=2, LONGEST_ANSWER=24), "tokens in the cache at the peak", 1),
    "retrofit": (dict(STEPS_PER_RATIO=2, RATIO=2.0, WINDOW=8), "live tokens:", 1),
    "compare_policies": (dict(SEQUENCES=2, LENGTH=64, RATIOS=(2,)), "SnapKV", 2),
    "hyperscaling": (dict(PROBLEMS=2, LENGTHS=(4, 8), CHAINS=(1, 2)), "whole cache", 1),
    "kernels": (dict(ROWS=2, CONTEXT=256, REPEATS=1), "1/8, uneven", 1),
}
RUNS_FOR_LONG = {"quickstart"}  # longer than it compiles
SOURCE = "https://github.com/dms-jax/dms_jax"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A folder with only the contents of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


@pytest.mark.release
@pytest.mark.parametrize("name", RUNS)
def test_a_notebook_runs_and_draws(name, installed, tmp_path, monkeypatch):
    settings, shown, figures = RUNS[name]
    environment = {
        "PYTHONPATH": str(installed),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "DMS_JAX_ASSETS": str(ROOT / "dms_jax" / "assets"),  # assets that would be fetched
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    if name in RUNS_FOR_LONG:
        environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "0"
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    notebook = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
    for setting, value in settings.items():
        changed = 0
        for cell in notebook.cells:
            cell.source, count = re.subn(
                f"(?m)^{setting} = .*$", f"{setting} = {value}", cell.source
            )
            changed += count
        assert changed == 1, f"{setting} is set {changed} times"
    empty = tmp_path / "empty"
    empty.mkdir()
    place = {"metadata": {"path": str(empty)}}
    nbclient.NotebookClient(notebook, timeout=600, resources=place).execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    texts = ("text/plain", "text/markdown")
    data = [output.get("data", {}).get(kind, "") for output in outputs for kind in texts]
    streams = [output.text for output in outputs if output.output_type == "stream"]
    printed = "".join([*streams, *data])
    assert "decoding: xla (no kernel is for cpu)" in printed
    assert shown in printed
    assert "Warning" not in printed
    pictures = [each.data["image/png"] for each in outputs if "image/png" in each.get("data", {})]
    assert len(pictures) == figures
    for picture in pictures:
        assert has_drawing(picture)


def has_drawing(picture: str) -> bool:
    """Whether a picture has coloured lines or areas beside its frame and text."""
    from matplotlib import image

    pixels = image.imread(io.BytesIO(base64.b64decode(picture)), format="png")[..., :3]
    return bool((np.ptp(pixels, axis=-1) > 0.3).mean() > 0.0001)


@pytest.mark.release
def test_control_empty_frame_is_no_drawing():
    from matplotlib.figure import Figure

    def drawn(*points):
        file = io.BytesIO()
        figure = Figure()
        axes = figure.subplots()
        axes.plot(*points)
        axes.set(xlabel="step", ylabel="loss", title="A run of one step")
        figure.savefig(file)
        return base64.b64encode(file.getvalue()).decode()

    assert not has_drawing(drawn([1], [2.0]))  # a line of one point
    assert has_drawing(drawn([1, 2], [2.0, 1.0]))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_script_equals_notebook_without_outputs(path):
    assert path.stem in RUNS
    notebook = nbformat.read(path.with_suffix(".ipynb"), as_version=4)
    script = jupytext.read(path)
    cells, same = (
        [(cell.cell_type, cell.source) for cell in each.cells] for each in (notebook, script)
    )
    assert cells == same, "run make notebooks"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    address = f"https://colab.research.google.com/github{SOURCE.removeprefix('https://github.com')}"
    assert f"({address}/blob/main/colab/{path.stem}.ipynb)" in notebook.cells[0].source
    assert f'SOURCE = "{SOURCE}"' in notebook.cells[1].source


def test_first_cells_are_equal():
    assert len({jupytext.read(path).cells[1].source for path in SCRIPTS}) == 1


@pytest.mark.parametrize(
    ("card", "tpu", "folder", "expected"),
    [
        (False, False, "empty", f"dms-jax[plots] @ git+{SOURCE}"),
        (True, False, "empty", f"dms-jax[plots,cuda] @ git+{SOURCE}"),
        (False, True, "empty", f"dms-jax[plots,tpu] @ git+{SOURCE}"),
        (False, False, "checkout/colab", "checkout[plots]"),
    ],
)
def test_first_cell_installs_extras_of_runtime(card, tpu, folder, expected, tmp_path, monkeypatch):
    where = tmp_path / folder
    where.mkdir(parents=True)
    package = tmp_path / "checkout" / "dms_jax"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    monkeypatch.chdir(where)
    monkeypatch.delenv("TPU_ACCELERATOR_TYPE", raising=False)
    if tpu:
        monkeypatch.setenv("TPU_ACCELERATOR_TYPE", "v5litepod-1")
    calls = []
    fakes = {
        "importlib": types.SimpleNamespace(util=types.SimpleNamespace(find_spec=lambda name: None)),
        "os": os,
        "pathlib": pathlib,
        "shutil": types.SimpleNamespace(which=lambda name: "/usr/bin/nvidia-smi" if card else None),
        "subprocess": types.SimpleNamespace(run=lambda call, check: calls.append(call)),
        "sys": sys,
    }
    source = jupytext.read(SCRIPTS[0]).cells[1].source.partition("\nimport jax\n")[0]
    exec(re.sub(r"(?m)^import .*$", "", source), fakes)
    (call,) = calls
    assert call[1:5] == ["-m", "pip", "install", "-q"]
    assert call[5] == (str(tmp_path / expected) if "checkout" in expected else expected)
    assert call[6:] == ["ipywidgets"]
