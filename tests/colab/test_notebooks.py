"""The notebooks run from an empty folder with the wheel of this checkout, and show their results.

`make outputs` executes them and keeps what they show.
"""

import base64
import io
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import types
import zipfile

import nbformat
import numpy as np
import pytest

from tests.colab.execute import COLAB, execute, unpacked_wheel

NOTEBOOKS = sorted(COLAB.glob("*.ipynb"))
# Small settings, a text that the run prints, and its number of figures.
RUNS = {
    "quickstart": (dict(PROBLEMS=2, LONGEST_ANSWER=24), "tokens in the cache at the peak", 1),
    "retrofit": (dict(STEPS_PER_RATIO=2, RATIO=2.0, WINDOW=8), "live tokens:", 1),
    "compare_policies": (dict(SEQUENCES=2, LENGTH=64, RATIOS=(2,)), "SnapKV", 1),
    "hyperscaling": (dict(PROBLEMS=2, LENGTHS=(4, 8), CHAINS=(1, 2)), "whole cache", 1),
    "kernels": (dict(ROWS=2, CONTEXT=256, REPEATS=1), "1/8, uneven", 1),
}
RUNS_FOR_LONG = {"quickstart"}  # longer than it compiles
SOURCE = "https://github.com/dms-jax/dms_jax"
# What a user uploads beside a notebook.
WHEEL, ZIP = "dms_jax-0.1.0-py3-none-any.whl", "dms_jax-main.zip"
UNPACKED = "empty/runs/unpacked/dms_jax-main"


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return unpacked_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.mark.release
@pytest.mark.parametrize("name", RUNS)
def test_a_notebook_runs_and_draws(name, installed, tmp_path):
    settings, _, _ = RUNS[name]
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"} if name in RUNS_FOR_LONG else {}
    notebook = nbformat.read(COLAB / f"{name}.ipynb", as_version=4)
    for setting, value in settings.items():
        changed = 0
        for cell in notebook.cells:
            cell.source, count = re.subn(
                f"(?m)^{setting} = .*$", f"{setting} = {value}", cell.source
            )
            changed += count
        assert changed == 1, f"{setting} is set {changed} times"
    execute(notebook, installed, tmp_path / "empty", seconds=600, **optimized)
    check_outputs(name, notebook)


def check_outputs(name: str, notebook: nbformat.NotebookNode) -> None:
    """Every cell ran, in order; what it shows is whole, and says nothing of the machine."""
    _, shown, figures = RUNS[name]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), "run make outputs"
    assert not any(cell.metadata for cell in notebook.cells)
    outputs = [output for cell in code for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
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
    said = [{**each, "data": {**each.get("data", {}), "image/png": ""}} for each in outputs]
    assert not re.search(r"/work/|/tmp/|/root/|/home/|site-packages|widget", json.dumps(said))


def has_drawing(picture: str) -> bool:
    """Whether a picture has coloured lines or areas beside its frame and text."""
    from matplotlib import image

    pixels = image.imread(io.BytesIO(base64.b64decode(picture)), format="png")[..., :3]
    return bool((np.ptp(pixels, axis=-1) > 0.3).mean() > 0.0001)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_outputs_are_whole(path):
    notebook = nbformat.read(path, as_version=4)
    check_outputs(path.stem, notebook)
    assert set(notebook.metadata) == {"kernelspec"}
    assert path.stat().st_size < 1.5e6
    address = f"https://colab.research.google.com/github{SOURCE.removeprefix('https://github.com')}"
    assert f"({address}/blob/main/colab/{path.stem}.ipynb)" in notebook.cells[0].source
    assert f'SOURCE = "{SOURCE}"' in notebook.cells[1].source


def test_calls_fit_the_library(tmp_path):
    """Names and arguments exist; the notebooks themselves run at a release only."""
    for path in NOTEBOOKS:
        cells = nbformat.read(path, as_version=4).cells
        code = [cell.source for cell in cells if cell.cell_type == "code"]
        (tmp_path / f"{path.stem}.py").write_text("\n\n".join(code), encoding="utf-8")
    settings = {"extraPaths": [str(COLAB.parent)], "typeCheckingMode": "basic"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    check = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", tmp_path]
    done = subprocess.run(check, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout


def test_first_cells_are_equal():
    assert len({nbformat.read(path, as_version=4).cells[1].source for path in NOTEBOOKS}) == 1


@pytest.mark.parametrize(
    ("card", "tpu", "folder", "uploaded", "expected", "models"),
    [
        (False, False, "empty", (), f"dms-jax[plots] @ git+{SOURCE}", None),
        (True, False, "empty", (), f"dms-jax[plots,cuda] @ git+{SOURCE}", None),
        (False, True, "empty", (), f"dms-jax[plots,tpu] @ git+{SOURCE}", None),
        (False, False, "checkout/colab", (), "{}/checkout[plots]", "checkout"),
        (False, False, "empty", (WHEEL,), f"{{}}/empty/{WHEEL}[plots]", None),
        (True, False, "empty", (ZIP,), f"{{}}/{UNPACKED}[plots,cuda]", UNPACKED),
        (False, False, "empty", (WHEEL, ZIP), f"{{}}/empty/{WHEEL}[plots]", UNPACKED),
    ],
)
def test_first_cell_installs_extras_of_runtime(
    card, tpu, folder, uploaded, expected, models, tmp_path, monkeypatch
):
    where = tmp_path / folder
    where.mkdir(parents=True)
    package = tmp_path / "checkout" / "dms_jax"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "pyproject.toml").touch()
    if WHEEL in uploaded:
        (where / WHEEL).touch()
    if ZIP in uploaded:
        with zipfile.ZipFile(where / ZIP, "w") as file:
            file.writestr("dms_jax-main/pyproject.toml", "")
            file.writestr("dms_jax-main/dms_jax/__init__.py", "")
    (call,) = run_first_cell(where, monkeypatch, card=card, tpu="v5litepod-1" if tpu else "")
    assert call == ["-m", "pip", "install", "-q", expected.format(tmp_path), "ipywidgets"]
    assets = None if models is None else str(tmp_path / models / "dms_jax" / "assets")
    assert os.environ.get("DMS_JAX_ASSETS") == assets


@pytest.mark.parametrize(
    ("uploaded", "says"),
    [
        ((), ["git archive -o dms_jax.zip HEAD", "upload it to {} and run this cell again."]),
        ((WHEEL,), [f"pip cannot install {{}}/{WHEEL}[plots]:\nno network"]),
    ],
)
def test_first_cell_explains_failed_install(uploaded, says, tmp_path, monkeypatch):
    for name in uploaded:
        (tmp_path / name).touch()
    with pytest.raises(Exception, match="pip cannot install") as stopped:
        run_first_cell(tmp_path, monkeypatch, error="no network")
    (shown,) = stopped.value._render_traceback_()  # what IPython prints in place of a traceback
    assert all(part.format(tmp_path) in shown for part in says)


def run_first_cell(
    where, monkeypatch, *, card: bool = False, tpu: str = "", error: str = ""
) -> list[list[str]]:
    """Runs it as if nothing were installed; returns what it would have called Python with.

    Args:
      where: the working directory.
      monkeypatch: pytest's.
      card: whether there is an NVIDIA card.
      tpu: which TPU there is; "" for none.
      error: with which pip fails; "" for success.
    """
    monkeypatch.chdir(where)
    monkeypatch.setenv("TPU_ACCELERATOR_TYPE", tpu)
    # Set and deleted, so that what the cell sets is undone too.
    for name in ("DMS_JAX_ASSETS", "GIT_TERMINAL_PROMPT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    calls = []

    def pip(call, **options):
        calls.append(call[1:])
        return types.SimpleNamespace(returncode=int(bool(error)), stderr=error)

    fakes = {
        "__name__": "first_cell",
        "importlib": types.SimpleNamespace(util=types.SimpleNamespace(find_spec=lambda name: None)),
        "os": os,
        "pathlib": pathlib,
        "shutil": types.SimpleNamespace(
            which=lambda name: "/usr/bin/nvidia-smi" if card else None,
            unpack_archive=shutil.unpack_archive,
        ),
        "subprocess": types.SimpleNamespace(run=pip),
        "sys": sys,
    }
    cell = nbformat.read(NOTEBOOKS[0], as_version=4).cells[1]
    source = cell.source.partition("\nimport jax\n")[0]
    exec(re.sub(r"(?m)^import .*$", "", source), fakes)
    return calls
