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

import sys
import time

from dms_jax.command_line.running import run
from experiments.reproduction.evictions.jobs import check_settings
from experiments.reproduction.evictions.page import show, write_pages
from experiments.reproduction.evictions.plan import Config, Paths, jobs
from experiments.reproduction.runs import carry_out, require_results, status

JOBS = "experiments.reproduction.evictions.jobs"


def main(config: Config) -> int:
    """Does what is left of the plan and writes the page; 1 if a job failed."""
    start = time.time()
    config = carry_out(config, JOBS, check_settings)
    failed = status(config)
    require_results(config, "results/*.json")
    pages = config.pages or config.out
    write_pages(config, pages)
    print(show(pages))
    left = sum(not Paths(config).done(job) for job in jobs(config))
    print(f"{left} jobs are left; the page is {pages / 'README.md'}; {time.time() - start:.0f} s")
    return failed


if __name__ == "__main__":
    stopped = "Stopped; the same command goes on from here."
    sys.exit(run(main, Config, description=__doc__, interrupted=stopped))
