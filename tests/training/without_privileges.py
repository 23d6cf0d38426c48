"""Runs a test again in a process that has given up root's privileges."""

import os
import pathlib
import subprocess
import sys

from dms_jax.evaluation.sandbox.inside import kernel

PROGRAM = """
import os, pytest, runpy, sys
os.environ["PRIVILEGES"] = "dropped"
runpy.run_path(sys.argv[1])["drop_capabilities"]()
sys.exit(pytest.main(sys.argv[2:]))
"""


def held_back(folder: pathlib.Path) -> bool:
    """Whether permissions hold this process back; root's hold nobody back."""
    folder.mkdir(mode=0o500)
    return not os.access(folder, os.W_OK)


def run_again(test: str, folder: pathlib.Path) -> None:
    """Runs one test as an owner like others, and fails if it fails there."""
    assert os.environ.get("PRIVILEGES") != "dropped", "root could not give up its privileges"
    options = ["-n", "0", "-q", "-p", "no:cacheprovider", "--basetemp", str(folder)]
    told = [sys.executable, "-c", PROGRAM, kernel.__file__, test, *options]
    done = subprocess.run(told, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
