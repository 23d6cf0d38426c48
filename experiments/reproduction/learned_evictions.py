"""Learned evictions beside each other at equal live tokens: DMS in four forms, KVzap, KVpop.

The shipped reasoner writes documents; every system is trained on the same tokens of them with the
same loop, fitted to keep a quarter and an eighth of the tokens beyond the window, and asked the
same problems from the real cache. TOVA and StreamingLLM stand beside them.

    python -m experiments.reproduction.learned_evictions --processes 4 --deadline-minutes 8
    python -m experiments.reproduction.learned_evictions --only report

Work is split into jobs that write files. A run that was cut off goes on where it stopped when the
same command is given again. Milliseconds of even and of uneven heads are measured by
`experiments/benchmarks/even_heads.py`.
"""

import dataclasses
import shutil
import sys
import time

import dms_jax
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import FAILED, run
from experiments.reproduction.evictions.jobs import check_settings, read_config, write_config
from experiments.reproduction.evictions.page import show, write_pages
from experiments.reproduction.evictions.plan import Config, Paths, jobs
from experiments.reproduction.processes import run_workers

JOBS = "experiments.reproduction.evictions.jobs"


def main(config: Config) -> int:
    """Does what is left of the plan and writes the page; 1 if a job failed."""
    start = time.time()
    if config.only != "report":
        make_folder("--out", config.out)
        check_settings(config)
        for leftover in ("locks", "failed"):  # of a run that was cut off
            shutil.rmtree(config.out / leftover, ignore_errors=True)
        write_config(config)
        run_workers(JOBS, config.out, config.processes, start + 60 * config.deadline_minutes)
    elif (config.out / "config.json").exists():  # the plan that was carried out
        own = dict(out=config.out, pages=config.pages, only=config.only)
        config = dataclasses.replace(read_config(config.out), **own)
    failures = sorted((config.out / "failed").glob("*.txt"))
    for failure in failures:
        print(f"failed: {failure}\n{failure.read_text().strip().splitlines()[-1]}")
    if not any(config.out.glob("results/*.json")):
        raise dms_jax.ConfigError(
            f"{config.out} holds no results yet; the same command without --only makes them."
        )
    pages = config.pages or config.out
    write_pages(config, pages)
    print(show(pages))
    left = sum(not Paths(config).done(job) for job in jobs(config))
    print(f"{left} jobs are left; the page is {pages / 'README.md'}; {time.time() - start:.0f} s")
    return FAILED if failures else 0


if __name__ == "__main__":
    stopped = "Stopped; the same command goes on from here."
    sys.exit(run(main, Config, description=__doc__, interrupted=stopped))
