"""Plants a mutant in a copy of the tree and runs its tests there."""

import contextlib
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence

from tests.mutants.mutant import Mutant
from tests.support.tree import RESULTS, ROOT, files

# Exit statuses of pytest: all tests passed; some failed; none was collected.
VERDICTS = {0: "survived", 1: "killed", 5: "has no test"}


def copy_tree(target: pathlib.Path) -> None:
    """Copies the files of the checkout, except figures written by scripts."""
    for name in files(without=RESULTS):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)


class Tree:
    """A copy of the files of the checkout, with one mutant at a time.

    Args:
      root: an empty folder.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root.resolve() / "tree"
        copy_tree(self.root)

    def judge(self, mutant: Mutant, timeout: float) -> tuple[str, str]:
        """Runs the tests of a mutant: (verdict, the end of their output).

        Verdicts: killed, survived, timed out, has no test, could not plant, could not run.
        """
        try:
            with self._planted(mutant):
                return self.run(mutant.tests, timeout)
        except (OSError, ValueError) as error:
            return "could not plant", str(error)

    def run(
        self, tests: Sequence[str], timeout: float, options: Sequence[str] = ("-x",)
    ) -> tuple[str, str]:
        """Runs tests of the gate."""
        command = [sys.executable, "-B", "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
        # Compiled programs are shared with the checkout; bytecode, which compares seconds, is not.
        own = {"PYTHONPATH": str(self.root), "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache")}
        try:
            done = subprocess.run(
                [*command, "-m", "not nightly and not release", *options, *tests],
                cwd=self.root,
                env=os.environ | own,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            return "timed out", ""
        verdict = VERDICTS.get(done.returncode, "could not run")
        return verdict, "\n".join(done.stdout.splitlines()[-12:])

    @contextlib.contextmanager
    def _planted(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / mutant.file
        right = path.read_text(encoding="utf-8")
        path.write_text(mutant.plant(right), encoding="utf-8")
        try:
            yield
        finally:
            path.write_text(right, encoding="utf-8")
