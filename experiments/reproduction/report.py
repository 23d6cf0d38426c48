"""The papers' claims in small: trains and measures what REPORT.md judges.

From one base model, the reasoning model that ships here: DMS and DMC with their ablations, beside
vanilla, TOVA, Quest, H2O, StreamingLLM and KCache. Accuracy against reads and peak for chains,
lengths and ratios; windows, tokens of training, losses, contexts beyond the training's.

    python -m experiments.reproduction.report --processes 12 --deadline-minutes 9
    python -m experiments.reproduction.report --only report

Work is split into jobs that write files. A run that was cut off goes on where it stopped when the
same command is given again; what is there is not done twice, and a training goes on from its
checkpoint.
"""

import dataclasses
import pathlib
import shutil
import sys
import tarfile
import time

import dms_jax
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import FAILED, run
from experiments.reproduction.claims.jobs import check_settings, read_config, write_config
from experiments.reproduction.claims.page import write_pages
from experiments.reproduction.claims.plan import Paths, jobs
from experiments.reproduction.claims.settings import Config
from experiments.reproduction.first_curve import split
from experiments.reproduction.processes import run_workers

JOBS = "experiments.reproduction.claims.jobs"
_PART_BYTES = 15_000_000


def main(config: Config) -> int:
    """Does what is left of the plan and writes the page; 1 if a job failed."""
    start = time.time()
    if config.only != "report":
        check_settings(config)
        make_folder("--out", config.out)
        for leftover in ("locks", "failed"):  # of a run that was cut off
            shutil.rmtree(config.out / leftover, ignore_errors=True)
        write_config(config)
        run_workers(JOBS, config.out, config.processes, start + 60 * config.deadline_minutes)
    elif (config.out / "config.json").exists():  # the plan that was carried out
        own = dict(out=config.out, pages=config.pages, pack=config.pack, only=config.only)
        config = dataclasses.replace(read_config(config.out), **own)
    if config.pack is not None:
        pack(config, config.pack)
    paths = Paths(config)
    failures = sorted((config.out / "failed").glob("*.txt"))
    for failure in failures:
        print(f"failed: {failure}\n{failure.read_text().strip().splitlines()[-1]}")
    if not any(paths.root.glob("results/vanilla/*")):
        raise dms_jax.ConfigError(
            f"{config.out} holds no results yet; the same command without --only makes them."
        )
    pages = config.pages or config.out
    write_pages(config, pages)
    left = sum(not paths.done(job) for job in jobs(config))
    print(f"{left} jobs are left; the page is {pages / 'REPORT.md'}; {time.time() - start:.0f} s")
    return FAILED if failures else 0


def pack(config: Config, folder: pathlib.Path) -> None:
    """Puts results and logs into an archive, cut into parts."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "claims.tar.gz"
    names = ["results", "summaries", "jobs", "failed", "config.json"]
    names += [path.name for path in config.out.glob("worker-*.log")]
    with tarfile.open(whole, "w:gz") as archive:
        for name in names:
            if (config.out / name).exists():
                archive.add(config.out / name, name)
    split(whole, _PART_BYTES)


if __name__ == "__main__":
    stopped = "Stopped; the same command goes on from here."
    sys.exit(run(main, Config, description=__doc__, interrupted=stopped))
