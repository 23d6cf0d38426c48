"""The checkout and a copy of it."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The packages of `make clients`.
CLIENTS = ROOT / os.environ.get("CLIENTS", ".clients")
# Figures written by scripts: large, and not code.
RESULTS = "experiments/results/"


def copy_tree(target: Path) -> Path:
    """Copies the files that git does not ignore, except figures written by scripts."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    target = target.resolve()
    for name in set(listed.stdout.split("\0")) - {""}:
        if (ROOT / name).is_file() and not name.startswith(RESULTS):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)
    return target
