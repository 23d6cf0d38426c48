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

import pathlib
import sys
import tarfile
import time

from dms_jax.command_line.running import run
from experiments.reproduction.claims.jobs import check_settings
from experiments.reproduction.claims.page import write_pages
from experiments.reproduction.claims.plan import left
from experiments.reproduction.claims.settings import Config
from experiments.reproduction.first_curve import split
from experiments.reproduction.runs import carry_out, require_results, status

JOBS = "experiments.reproduction.claims.jobs"
_PART_BYTES = 15_000_000


def main(config: Config) -> int:
    """Does what is left of the plan and writes the page; 1 if a job failed."""
    start = time.time()
    config = carry_out(config, JOBS, check_settings)
    if config.pack is not None:
        pack(config, config.pack)
    failed = status(config)
    require_results(config)
    pages = config.pages or config.out
    write_pages(config, pages)
    seconds = time.time() - start
    print(f"{len(left(config))} jobs are left; the page is {pages / 'REPORT.md'}; {seconds:.0f} s")
    return failed


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
