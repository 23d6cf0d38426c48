"""The first curve: accuracy against live tokens and against reads, for DMS and its rivals.

From one base model: it writes its own training data; DMS is retrofitted on it in several variants,
each run passing through all compression ratios; the control is trained on the same tokens without
eviction; then vanilla, the control, every DMS snapshot, TOVA, StreamingLLM and random eviction
answer the same problems from the real cache, three seeds each.

    python -m experiments.reproduction.first_curve --processes 8 --deadline-minutes 9
    python -m experiments.reproduction.first_curve --only report

Work is split into jobs that write files. A run that was cut off goes on where it stopped when the
same command is given again; what is there is not done twice.
"""

import json
import pathlib
import sys
import tarfile
import time

from dms_jax.command_line.running import run
from experiments.reproduction.curve.jobs import check_settings
from experiments.reproduction.curve.page import write_pages
from experiments.reproduction.curve.plan import Config, Paths, left
from experiments.reproduction.runs import carry_out, require_results, status

JOBS = "experiments.reproduction.curve.jobs"
_PART_BYTES = 15_000_000


def main(config: Config) -> int:
    """Does what is left of the plan and writes the page; 1 if a job failed."""
    start = time.time()
    config = carry_out(config, JOBS, check_settings)
    failed = status(config)
    if config.only == "data":
        return failed
    require_results(config)
    pages = config.pages or config.out
    write_pages(config, pages)
    if config.pack is not None:
        pack(config, config.pack)
    seconds = time.time() - start
    print(f"{len(left(config))} jobs are left; the page is {pages / 'README.md'}; {seconds:.0f} s")
    return failed


def pack(config: Config, folder: pathlib.Path) -> None:
    """Puts what is worth keeping into few files: results, and one DMS model at two ratios."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = ("results", "training", "jobs", "config.json")
    logs = [path.name for path in config.out.glob("worker-*.log")]
    with tarfile.open(folder / "results.tar.gz", "w:gz") as archive:
        for name in (*kept, *logs):
            if (config.out / name).exists():
                archive.add(config.out / name, name)
    summary = json.loads(((config.pages or config.out) / "results.json").read_text())
    best = summary["best_dms"]
    for ratio in (4.0, 8.0):
        source = best and Paths(config).model(best, 0, ratio)
        if source and source.exists():
            whole = folder / f"{source.name}.tar"
            with tarfile.open(whole, "w") as archive:
                archive.add(source, source.name)
            split(whole, _PART_BYTES)


def split(path: pathlib.Path, size: int) -> None:
    """Cuts a file into parts that `cat` puts together again."""
    data = path.read_bytes()
    for number, start in enumerate(range(0, len(data), size)):
        path.with_name(f"{path.name}.{number}").write_bytes(data[start : start + size])
    path.unlink()


if __name__ == "__main__":
    stopped = "Stopped; the same command goes on from here."
    sys.exit(run(main, Config, description=__doc__, interrupted=stopped))
