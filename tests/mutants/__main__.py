"""Plants mutants and reports which of them the tests of the gate kill.

    python -m tests.mutants --workers 2             all of them
    python -m tests.mutants --only adakv pyramid    those whose name contains one of the words
    python -m tests.mutants --unplanted             their tests without any mutant: all green?

Each mutant is planted alone in a copy of the tree; the checkout is never changed. Verdicts are
written to --out at once. An interrupted run resumes from there, unless a file of the tree has
changed. The exit status is the number of surviving mutants.
"""

import argparse
import concurrent.futures
import contextlib
import datetime
import importlib.metadata
import json
import pathlib
import platform
import queue
import sys
import tempfile
import time
from typing import Any

from tests.mutants.mutant import Mutant
from tests.mutants.planting import Tree
from tests.mutants.table import MUTANTS
from tests.support.tree import RESULTS, ROOT, digest, files

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "pytest")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], help="words that names must hold")
    parser.add_argument("--unplanted", action="store_true", help="run the tests with no mutant")
    parser.add_argument("--workers", type=int, default=1, help="mutants at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a mutant's tests")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "runs" / "mutants.json")
    options = parser.parse_args()
    chosen = [each for each in MUTANTS if any(word in each.name for word in options.only)]
    with contextlib.ExitStack() as stack:

        def tree() -> Tree:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            return Tree(pathlib.Path(folder))

        if options.unplanted:
            return without_mutants(tree(), chosen, options.timeout)
        record = Record(options.out)
        left = [mutant for mutant in chosen if record.verdict(mutant) != "killed"]
        judge_all([tree() for _ in range(min(options.workers, len(left)))], left, options, record)
    survivors = [mutant.name for mutant in chosen if record.verdict(mutant) != "killed"]
    print(f"{len(chosen) - len(survivors)} of {len(chosen)} killed")
    print(f"left: {', '.join(survivors) or '-'}")
    return len(survivors)


class Record:
    """The verdicts of one state of the tree, in a file."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        versions = {"python": platform.python_version()}
        versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
        tree = digest(files(without=RESULTS))
        kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        self.data: dict[str, Any] = kept
        if (kept.get("tree"), kept.get("versions")) != (tree, versions):
            date = datetime.datetime.now(datetime.UTC).date().isoformat()
            self.data = {"date": date, "tree": tree, "versions": versions, "verdicts": {}}

    def verdict(self, mutant: Mutant) -> str | None:
        return self.data["verdicts"].get(mutant.name)

    def add(self, mutant: Mutant, verdict: str) -> None:
        self.data["verdicts"][mutant.name] = verdict
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.data, indent=1) + "\n", encoding="utf-8")


def judge_all(
    trees: list[Tree], mutants: list[Mutant], options: argparse.Namespace, record: Record
) -> None:
    """Judges mutants, as many in parallel as there are trees."""
    idle: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for tree in trees:
        idle.put(tree)

    def judge(mutant: Mutant) -> tuple[str, str, float]:
        tree, begin = idle.get(), time.monotonic()
        try:
            verdict, output = tree.judge(mutant, options.timeout)
        finally:
            idle.put(tree)
        return verdict, output, time.monotonic() - begin

    with concurrent.futures.ThreadPoolExecutor(max(1, len(trees))) as pool:
        running = {pool.submit(judge, mutant): mutant for mutant in mutants}
        for done in concurrent.futures.as_completed(running):
            mutant, (verdict, output, seconds) = running[done], done.result()
            record.add(mutant, verdict)
            print(f"{record.verdict(mutant):20}{seconds:6.1f} s  {mutant.name}", flush=True)
            if verdict not in ("killed", "survived"):
                print(output, flush=True)


def without_mutants(tree: Tree, chosen: list[Mutant], timeout: float) -> int:
    """Runs the tests of mutants without planting any; returns 0 if all pass."""
    tests = sorted({test for mutant in chosen for test in mutant.tests})
    verdict, output = tree.run(tests, timeout * len(chosen), options=())
    print(output)
    return int(verdict != "survived")


if __name__ == "__main__":
    sys.exit(main())
