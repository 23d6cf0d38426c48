"""Plants mutants one by one and says which of them the tests notice.

    python -m tests.mutants                              all of them, one after another
    python -m tests.mutants --only adakv pyramid         those whose name holds one of the words
    python -m tests.mutants --missing --out FILE.json    those that the file has no verdict of
    python -m tests.mutants --unplanted                  their tests without any mutant: all green?
    python -m tests.mutants --out FILE.json --column after

Each is planted alone, in a copy of the tree; the checkout is never touched. The exit status is the
number of mutants that were not killed. This is no part of continuous integration: `test_table`
only checks there that every mutant can still be planted.
"""

import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import sys
import tempfile
from typing import Any

from tests.mutants.mutant import Mutant
from tests.mutants.planting import Tree
from tests.mutants.table import MUTANTS

PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "pytest")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plants mutants and runs their tests.")
    parser.add_argument("--only", nargs="+", default=[""], help="words that names must hold")
    parser.add_argument("--missing", action="store_true", help="leave out those with a verdict")
    parser.add_argument("--unplanted", action="store_true", help="run the tests with no mutant")
    parser.add_argument("--timeout", type=float, default=300, help="seconds of a mutant's tests")
    parser.add_argument("--out", type=pathlib.Path, help="a JSON file that the verdicts go into")
    parser.add_argument("--column", choices=("before", "after"), default="after")
    return parser.parse_args()


def merged(path: pathlib.Path, verdicts: dict[str, dict[str, Any]], column: str) -> dict[str, Any]:
    """What the file holds, with these verdicts in one of its columns."""
    data = read(path)
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in PACKAGES}
    run = {"date": datetime.datetime.now(datetime.UTC).date().isoformat(), "versions": versions}
    data.setdefault(column, run)  # of the first; a later one says itself what differs
    differs = {name: value for name, value in run.items() if data[column][name] != value}
    for mutant in MUTANTS:
        if mutant.name in verdicts:
            entry = data["mutants"].setdefault(mutant.name, {})
            entry["file"] = mutant.file
            entry[column] = verdicts[mutant.name] | differs
    return data


def without_verdict(path: pathlib.Path | None, column: str) -> list[Mutant]:
    """The mutants of the table that a file says nothing of."""
    known = read(path)["mutants"] if path is not None else {}
    return [mutant for mutant in MUTANTS if column not in known.get(mutant.name, {})]


def read(path: pathlib.Path) -> dict[str, Any]:
    """What a file of verdicts holds."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"mutants": {}}


def main() -> int:
    options = arguments()
    with tempfile.TemporaryDirectory() as folder:
        return work(options, Tree(pathlib.Path(folder)))


def work(options: argparse.Namespace, tree: Tree) -> int:
    among = without_verdict(options.out, options.column) if options.missing else MUTANTS
    chosen = [each for each in among if any(word in each.name for word in options.only)]
    if options.unplanted:
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        verdict, output, seconds = tree.judge(None, tests, options.timeout * len(chosen))
        print(output, f"{seconds:.0f} s", sep="\n")
        return int(verdict != "survived")
    verdicts: dict[str, dict[str, Any]] = {}
    for mutant in chosen:
        verdict, output, seconds = tree.judge(mutant, mutant.tests, options.timeout)
        print(f"{verdict:16}{seconds:6.1f} s  {mutant.name}", flush=True)
        if verdict not in ("killed", "survived"):
            print(output, flush=True)
        verdicts[mutant.name] = {
            "verdict": verdict,
            "seconds": round(seconds, 1),
            "tests": list(mutant.tests),
        }
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            data = merged(options.out, verdicts, options.column)
            options.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    left = [name for name, found in verdicts.items() if found["verdict"] != "killed"]
    print(f"{len(verdicts) - len(left)} of {len(verdicts)} killed; left: {', '.join(left) or '-'}")
    return len(left)


if __name__ == "__main__":
    sys.exit(main())
