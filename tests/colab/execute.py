"""Executes notebooks in an empty folder, on the wheel of this checkout, and keeps what they show.

    python -m tests.colab.execute               all of colab/*.ipynb, written in place
    python -m tests.colab.execute quickstart    one of them

The rest of the checkout stays as it is.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile

import nbclient
import nbformat

ROOT = pathlib.Path(__file__).parents[2]
COLAB = ROOT / "colab"
SECONDS = 3600  # for a cell, on a machine that does other things too


def unpacked_wheel(folder: pathlib.Path) -> pathlib.Path:
    """Returns a folder with nothing but what the wheel holds."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    return folder / "site"


def execute(
    notebook: nbformat.NotebookNode,
    installed: pathlib.Path,
    folder: pathlib.Path,
    seconds: int = SECONDS,
    **environment: str,
) -> None:
    """Executes a notebook on one CPU device; it then holds its outputs and no other metadata.

    Args:
      notebook: changed in place.
      installed: the packages, from `unpacked_wheel`.
      folder: where it runs; made here.
      seconds: that a cell may take.
      environment: further variables.
    """
    given = {
        "PYTHONPATH": str(installed),
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "DMS_JAX_ASSETS": str(ROOT / "dms_jax" / "assets"),  # what would be fetched
        "IPYTHONDIR": str(folder.parent / "ipython"),
        "TF_CPP_MIN_LOG_LEVEL": "3",  # XLA says which programs compile slowly
    }
    folder.mkdir()
    before = dict(notebook.metadata)
    client = nbclient.NotebookClient(
        notebook,
        timeout=seconds,
        record_timing=False,
        coalesce_streams=True,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env={**os.environ, **given, **environment})
    notebook.metadata = nbformat.from_dict(before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="of the notebooks; all by default")
    names = parser.parse_args().names or sorted(path.stem for path in COLAB.glob("*.ipynb"))
    with tempfile.TemporaryDirectory() as temporary:
        installed = unpacked_wheel(pathlib.Path(temporary))
        for name in names:
            path = COLAB / f"{name}.ipynb"
            notebook = nbformat.read(path, as_version=4)
            start = time.perf_counter()
            execute(notebook, installed, pathlib.Path(temporary) / name)
            nbformat.write(notebook, path)
            seconds, size = time.perf_counter() - start, path.stat().st_size
            print(f"{name}: {seconds:.0f} s, {size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
