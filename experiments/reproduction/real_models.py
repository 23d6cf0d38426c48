r"""Two real language models with a small cache: retrofits on own answers, beside every method.

Qwen2.5-Coder-0.5B-Instruct answers GSM8K; SmolLM2-135M-Instruct chooses endings, reads text and
looks for needles. Each samples its own answers, is retrofitted with DMS in several ways, and is
compared with itself, with itself trained further on the same tokens, and with what needs no
training at as many measured live tokens.

    python -m experiments.reproduction.real_models --qwen qwen.gguf --smollm2 smollm2.gguf \
        --data data --processes 2 --deadline-minutes 20
    python -m experiments.reproduction.real_models --only report

Work is split into jobs that write files. A run that was cut off goes on where it stopped when the
same command is given again; what is there is not done twice, a training goes on from its
checkpoint, and an evaluation after the answers that it has. `--self-taught DIR` takes answers and
the planned retrofit from a run of `dms-jax retrofit self-taught`, even while it is at work on
another GPU; `--join` gives a GPU that has become free to a run that is at work. `--only list` says
what the jobs are called, and `--parts` chooses among them. `--also` takes in what the same run
measured elsewhere, and `--run 2 --earlier results.json` shows beside a run what earlier ones
measured and it did not, or beside an earlier one, if `--judged` is what that alone measured, what
this one adds.
"""

import dataclasses
import pathlib
import sys
import tarfile
import time

from dms_jax.command_line.running import run
from experiments.reproduction.first_curve import split
from experiments.reproduction.processes import run_workers
from experiments.reproduction.real.jobs import check_settings
from experiments.reproduction.real.page import write_pages
from experiments.reproduction.real.plan import Paths, jobs
from experiments.reproduction.real.results import THREE
from experiments.reproduction.real.settings import Config
from experiments.reproduction.real.systems import TRAININGS, judged_first
from experiments.reproduction.runs import carry_out, require_results, status

JOBS = "experiments.reproduction.real.jobs"
_ANSWERS = "results/*/*/gsm8k/answers.jsonl"
_TIMED = "results/*/*/speed.jsonl"  # what is there of steps that are not all timed
_PART_BYTES = 15_000_000


def main(config: Config) -> int:
    """Does what is left of the plan and writes the page; 1 if a job failed."""
    start = time.time()
    if config.only == "list":
        show(config)
        return 0
    if config.join:
        end = start + 60 * config.deadline_minutes
        own = {"parts": config.parts} if config.parts else {}
        run_workers(JOBS, config.out, config.processes, end, **own)
        return status(config)
    plan = carry_out(config, JOBS, check_settings)
    # Of this call, also of a report alone: its page may judge what its plan did not name.
    told = dict(run=config.run, earlier=config.earlier, also=config.also)
    told |= {"judged": config.judged} if config.judged else {}
    config = dataclasses.replace(plan, **told)
    if config.pack is not None:
        pack(config, config.pack)
    paths = Paths(plan)
    failed = status(plan)
    left = [job for job in jobs(plan) if not paths.done(job)]
    print(f"{len(left)} jobs are left; {time.time() - start:.0f} s")
    if config.parts and (waiting := [job.name for job in left if not paths.ready(job)]):
        print(f"For what is not done yet, or in no part, wait: {', '.join(waiting)}")
    if config.only in ("jobs", "speed"):
        return failed
    # The plain cache, with which all others are compared, may be an earlier run's.
    needed = "results/*/vanilla/*.json" if config.earlier is None else "results/*/*/*.json"
    if not any(any(each.glob(needed)) for each in config.also):
        require_results(config, needed)
    pages = config.pages or config.out
    write_pages(config, pages)
    print(f"The page is {pages / 'README.md'}")
    return failed


def show(config: Config) -> None:
    """Says what the jobs are called, in the order in which they are begun, and how they stand."""
    paths = Paths(config)
    for job in jobs(config):
        states = {
            "done": paths.done(job),
            "failed": paths.failure(job).exists(),
            "at work": paths.lock(job).exists(),
            "waits": not paths.ready(job),
        }
        print(f"{next((name for name, is_so in states.items() if is_so), 'open'):8} {job.name}")


def pack(config: Config, folder: pathlib.Path) -> None:
    """Puts results, logs and two adapters into an archive, cut into parts; no weights of a model.

    Of the adapters there are those of which one is judged: all would be most of the archive.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / "real-models.tar.gz"
    names = ["summaries", "jobs", "failed", "config.json", THREE]
    names += [path.name for path in config.out.glob("worker-*.log")]
    names += [str(f.relative_to(config.out)) for f in config.out.glob("results/*/*/*.json")]
    # What was answered says where an answer went another way; 0.5 MB a system.
    names += [str(f.relative_to(config.out)) for f in config.out.glob(_ANSWERS)]
    names += [str(f.relative_to(config.out)) for f in config.out.glob(_TIMED)]
    names += [f"trainings/{name}/model" for name in judged_first(config)]
    names += [f"trainings/{name}/log.jsonl" for name in TRAININGS]
    with tarfile.open(whole, "w:gz") as archive:
        for name in names:
            if (config.out / name).exists():
                archive.add(config.out / name, name)
    split(whole, _PART_BYTES)


if __name__ == "__main__":
    stopped = "Stopped; the same command goes on from here."
    sys.exit(run(main, Config, description=__doc__, interrupted=stopped))
