"""Plants a mutant in a copy of the tree and runs its tests there."""

import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.mutants.mutant import Mutant

ROOT = pathlib.Path(__file__).resolve().parents[2]
# What no test of a mutant reads: figures that scripts wrote.
LEFT_OUT = "experiments/results/"
# Of pytest: all tests passed; some failed.
PASSED, FAILED = 0, 1


def copy_tree(target: pathlib.Path) -> None:
    """Copies the files of the checkout that git does not ignore, as they stand."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in set(listed.stdout.decode().split("\0")) - {""}:
        if (ROOT / name).is_file() and not name.startswith(LEFT_OUT):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


class Tree:
    """A copy of the tree, in which one mutant stands at a time.

    Args:
      root: an empty folder.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root.resolve()
        self._writes = 0
        copy_tree(self.root)

    def judge(
        self, mutant: Mutant | None, tests: Sequence[str], timeout: float
    ) -> tuple[str, str, float]:
        """Runs tests with a mutant planted, or with none: (verdict, output, seconds)."""
        begin = time.perf_counter()
        if mutant is None:
            verdict, output = run_tests(self.root, tests, timeout)
            return verdict, output, time.perf_counter() - begin
        path = self.root / mutant.file
        try:
            right = path.read_text(encoding="utf-8")
            wrong = mutant.plant(right)
        except (OSError, ValueError) as error:
            return "could not plant", str(error), time.perf_counter() - begin
        self._write(path, wrong)
        try:
            verdict, output = run_tests(self.root, tests, timeout)
        finally:
            self._write(path, right)
        return verdict, output, time.perf_counter() - begin

    def _write(self, path: pathlib.Path, text: str) -> None:
        """With a time of its own: Python tells compiled files by the second of their sources."""
        path.write_text(text, encoding="utf-8")
        self._writes += 1
        stamp = time.time() + 2 * self._writes
        os.utime(path, (stamp, stamp))


def run_tests(tree: pathlib.Path, tests: Sequence[str], timeout: float) -> tuple[str, str]:
    """Runs tests of a tree: (verdict, the end of their output).

    The verdict is "survived", "killed", "timed out" or "could not run". Compiled functions are kept
    with those of the checkout.
    """
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
    }
    command = [sys.executable, "-m", "pytest", "-n", "0", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        done = subprocess.run(
            [*command, *tests],
            cwd=tree,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
    except subprocess.TimeoutExpired:
        return "timed out", f"the tests did not end within {timeout:g} s"
    verdict = {PASSED: "survived", FAILED: "killed"}.get(done.returncode, "could not run")
    return verdict, "\n".join((done.stdout + done.stderr).splitlines()[-12:])
