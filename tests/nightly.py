"""Runs every test but those of a release, with the checks of jaxtyping, in shards.

    python -m tests.nightly                 all shards, one after another
    python -m tests.nightly --shard 3/6     one of them
    python -m tests.nightly --costs         write tests/costs.json by what the shards took

Each shard has whole files and takes about as long as the others. A shard that passed is skipped
until a file of the tree changes; `runs/nightly` records what ran, and when.
"""

import argparse
import datetime
import json
import subprocess
import sys

from tests.support import costs
from tests.support.tree import ROOT, digest, files

RUNS = ROOT / "runs" / "nightly"
MEASURED = RUNS / "costs.json"


def shards(count: int) -> list[list[str]]:
    """Splits the test files into shards of about equal duration."""
    measured = costs.known()
    names = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    seconds = {name: measured.get(name, costs.UNKNOWN)[1] for name in names}
    filled: list[list[str]] = [[] for _ in range(count)]
    for name in sorted(names, key=lambda name: (-seconds[name], name)):
        min(filled, key=lambda shard: sum(map(seconds.__getitem__, shard))).append(name)
    return filled


def run(number: int, count: int, workers: int) -> bool:
    """Runs a shard, unless it passed in this tree; returns whether it passed."""
    record = RUNS / f"{number}-of-{count}.json"
    before = digest(files())
    if record.exists() and (passed := json.loads(record.read_text()))["tree"] == before:
        print(f"shard {number}/{count} passed on {passed['date']}", flush=True)
        return True
    record.unlink(missing_ok=True)
    print(f"shard {number}/{count}", flush=True)
    options = ["-n", str(workers), "-m", "not release", f"--costs={MEASURED}"]
    options += ["--jaxtyping-packages=dms_jax,pallas_kernels,beartype.beartype"]
    command = [sys.executable, "-m", "pytest", *options, *shards(count)[number - 1]]
    done = subprocess.run(command, cwd=ROOT)
    if done.returncode == 0 and digest(files()) == before:
        date = datetime.datetime.now(datetime.UTC).isoformat(" ", "seconds")
        record.write_text(json.dumps({"tree": before, "date": date}) + "\n")
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2, help="processes of the test run")
    parser.add_argument("--shards", type=int, default=6, help="into how many all is split")
    parser.add_argument("--shard", help="one shard: 3/6 is the third of six")
    parser.add_argument("--costs", action="store_true", help="write tests/costs.json")
    options = parser.parse_args()
    RUNS.mkdir(parents=True, exist_ok=True)
    if options.costs:
        measured = costs.known() | json.loads(MEASURED.read_text())
        costs.write(costs.COSTS, {k: v for k, v in measured.items() if (ROOT / k).exists()})
        return 0
    numbers, count = range(1, options.shards + 1), options.shards
    if options.shard:
        number, count = map(int, options.shard.split("/"))
        numbers = [number]
    failed = [number for number in numbers if not run(number, count, options.workers)]
    if failed:
        print(f"failed: shards {', '.join(map(str, failed))} of {count}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
