"""Plants mutants and reports which of them their tests kill, nightly ones too.

    python -m tests.mutants --workers 2             all of them
    python -m tests.mutants --only adakv pyramid    those whose name contains one of the words
    python -m tests.mutants --unplanted             their tests without any mutant: all green?

Each mutant is planted alone in a copy of the tree; the checkout is never changed. The exit status
is the number of surviving mutants.
"""

import argparse
import concurrent.futures
import os
import pathlib
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

from tests.mutants.mutant import Mutant
from tests.mutants.table import MUTANTS
from tests.support.tree import ROOT, copy_tree

# Exit statuses of pytest: all tests passed; some failed; none was collected.
VERDICTS = {0: "survived", 1: "killed", 5: "has no test"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="words that names must hold")
    parser.add_argument("--unplanted", action="store_true", help="run the tests with no mutant")
    parser.add_argument("--workers", type=int, default=1, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a mutant's tests")
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if any(word in each.name for word in options.only)]
    with tempfile.TemporaryDirectory() as folder:
        trees: queue.SimpleQueue[pathlib.Path] = queue.SimpleQueue()
        for number in range(options.workers):
            trees.put(copy_tree(pathlib.Path(folder) / str(number)))
        if options.unplanted:
            tests = sorted({test for mutant in chosen for test in mutant.tests})
            verdict, output = run(trees.get(), tests, options.timeout * len(chosen), options=())
            print(output)
            return int(verdict != "survived")

        def judged(mutant: Mutant) -> tuple[str, str]:
            tree, begin = trees.get(), time.monotonic()
            try:
                verdict, output = judge(tree, mutant, options.timeout)
            finally:
                trees.put(tree)
            print(f"{verdict:20}{time.monotonic() - begin:6.1f} s  {mutant.name}", flush=True)
            if verdict not in ("killed", "survived"):
                print(output, flush=True)
            return mutant.name, verdict

        with concurrent.futures.ThreadPoolExecutor(options.workers) as pool:
            found = list(pool.map(judged, chosen))
    survivors = [name for name, verdict in found if verdict != "killed"]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    print(f"left: {', '.join(survivors) or '-'}")
    return len(survivors)


def judge(tree: pathlib.Path, mutant: Mutant, timeout: float) -> tuple[str, str]:
    """Runs the tests of a mutant in a copy of the tree: (verdict, the end of their output).

    Verdicts: killed, survived, timed out, has no test, could not plant, could not run.
    """
    path = tree / mutant.file
    try:
        right = path.read_text(encoding="utf-8")
        wrong = mutant.plant(right)
    except (OSError, ValueError) as error:
        return "could not plant", str(error)
    path.write_text(wrong, encoding="utf-8")
    try:
        return run(tree, mutant.tests, timeout)
    finally:
        path.write_text(right, encoding="utf-8")


def run(
    tree: pathlib.Path, tests: Sequence[str], timeout: float, options: Sequence[str] = ("-x",)
) -> tuple[str, str]:
    """Runs tests in a copy of the tree."""
    command = [sys.executable, "-B", "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    # Compiled programs are shared with the checkout; bytecode, which compares seconds, is not.
    own = {"PYTHONPATH": str(tree), "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache")}
    try:
        done = subprocess.run(
            [*command, "-m", "not release", *options, *tests],
            cwd=tree,
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


if __name__ == "__main__":
    sys.exit(main())
