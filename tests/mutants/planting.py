"""Plants a mutant in a copy of the tree and runs its tests there."""

import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from tests.mutants.mutant import Mutant
from tests.support.tree import RESULTS, ROOT, files

# Exit statuses of pytest: all tests passed; some failed; none was collected.
VERDICTS = {0: "survived", 1: "killed", 5: "has no test", None: "timed out"}


def copy_tree(target: pathlib.Path) -> None:
    """Copies the files of the checkout, except figures written by scripts."""
    for name in files(without=RESULTS):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target / name)


class Tree:
    """A copy of the tree, with one mutant at a time.

    Args:
      root: an empty folder.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root.resolve() / "tree"
        self._scratch = root.resolve() / "scratch"
        self._output = root.resolve() / "output.txt"
        self._writes = 0
        copy_tree(self.root)
        # Compiled programs are shared with the checkout.
        environment = os.environ | {
            "PYTHONPATH": str(self.root),
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"),
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutants.warm"],
            cwd=self.root,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout.readline() == "ready\n"

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()

    def judge(self, mutant: Mutant, timeout: float) -> tuple[str, str]:
        """Runs the tests of a mutant: (verdict, the end of their output).

        Verdicts: killed, survived, timed out, has no test, could not plant, could not run.
        """
        try:
            with self._planted(mutant):
                return self.run(mutant.tests, timeout, night=mutant.night)
        except (OSError, ValueError) as error:
            return "could not plant", str(error)

    def run(
        self, tests: Sequence[str], timeout: float, night: bool, options: Sequence[str] = ("-x",)
    ) -> tuple[str, str]:
        """Runs tests of the gate, or also nightly ones."""
        chosen = "not release" if night else "not nightly and not release"
        arguments = ["-n", "0", "-q", "-p", "no:cacheprovider", f"--basetemp={self._scratch}"]
        arguments += ["-m", chosen, *options, *tests]
        asked = {"arguments": arguments, "timeout": timeout, "output": str(self._output)}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        verdict = VERDICTS.get(json.loads(self._process.stdout.readline()), "could not run")
        said = self._output.read_text(errors="replace").splitlines()
        return verdict, "\n".join(said[-12:])

    @contextlib.contextmanager
    def _planted(self, mutant: Mutant) -> Iterator[None]:
        path = self.root / mutant.file
        right = path.read_text(encoding="utf-8")
        self._write(path, mutant.plant(right))
        try:
            yield
        finally:
            self._write(path, right)

    def _write(self, path: pathlib.Path, text: str) -> None:
        """Writes with a new modification time, because Python's bytecode cache compares seconds."""
        path.write_text(text, encoding="utf-8")
        self._writes += 1
        stamp = time.time() + 2 * self._writes
        os.utime(path, (stamp, stamp))
