"""The current files of the checkout that git does not ignore."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The packages of `make clients`.
CLIENTS = ROOT / os.environ.get("CLIENTS", ".clients")
# Figures written by scripts: large, and not code.
RESULTS = "experiments/results/"


def files(without: str | None = None) -> list[str]:
    """Returns their paths from the root, except those that begin with `without`."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    names = set(listed.stdout.decode().split("\0")) - {""}
    kept = [name for name in names if without is None or not name.startswith(without)]
    return sorted(name for name in kept if (ROOT / name).is_file())
