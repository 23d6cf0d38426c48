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

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile
import time

import dms_jax
from experiments.reproduction.curve.jobs import (
    check_settings,
    read_config,
    write_config,
    write_text,
)
from experiments.reproduction.curve.page import write_pages
from experiments.reproduction.curve.plan import Config, Paths, jobs
from experiments.shared.command_line import FAILED, run
from experiments.shared.reports import make_folder

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
_PART_BYTES = 15_000_000
_GRACE_SECONDS = 40  # after the deadline, to end what was begun


def main(config: Config) -> int:
    """Does what is left of the plan and writes the page; 1 if a job failed."""
    start = time.time()
    if config.only != "report":
        make_folder("--out", config.out)
        check_settings(config)
        for leftover in ("locks", "failed"):  # of a run that was cut off
            shutil.rmtree(config.out / leftover, ignore_errors=True)
        write_config(config)
        _run_workers(config, start + 60 * config.deadline_minutes)
    elif (config.out / "config.json").exists():  # the plan that was carried out
        own = dict(out=config.out, pages=config.pages, pack=config.pack, only=config.only)
        config = dataclasses.replace(read_config(config.out), **own)
    paths = Paths(config)
    failures = sorted((config.out / "failed").glob("*.txt"))
    for failure in failures:
        print(f"failed: {failure}\n{failure.read_text().strip().splitlines()[-1]}")
    if config.only == "data":
        return FAILED if failures else 0
    if not any(paths.root.glob("results/vanilla/*")):
        raise dms_jax.ConfigError(
            f"{config.out} holds no results yet; the same command without --only makes them."
        )
    pages = config.pages or config.out
    write_pages(config, pages)
    if config.pack is not None:
        pack(config, config.pack)
    left = sum(not paths.done(job) for job in jobs(config))
    print(f"{left} jobs are left; the page is {pages / 'README.md'}; {time.time() - start:.0f} s")
    return FAILED if failures else 0


def _run_workers(config: Config, deadline: float) -> None:
    """Starts the processes, each on its own GPU where there are several, and waits for them."""
    program = (
        "from experiments.reproduction.curve.jobs import worker; "
        f"worker({str(config.out)!r}, {deadline})"
    )
    workers, logs, gpus = [], [], count_gpus()
    try:
        for index in range(config.processes):
            log = (config.out / f"worker-{index}.log").open("a")
            logs.append(log)
            workers.append(
                subprocess.Popen(
                    [sys.executable, "-c", program],
                    env=environment(config.out, gpu_of(index, config.processes, gpus)),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            )
        _follow(config, workers, deadline + _GRACE_SECONDS)
    finally:
        stop(workers)
        for log in logs:
            log.close()


def environment(out: pathlib.Path, gpu: dict[str, str]) -> dict[str, str]:
    """Of a worker: where the code is, its GPU, and one cache of compiled programs for all."""
    folders = [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    return {
        "JAX_COMPILATION_CACHE_DIR": str(out.resolve() / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.3",
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **gpu,
    }


def stop(workers: list[subprocess.Popen]) -> None:
    """Ends the workers that still run, and waits until they have."""
    for worker in workers:
        if worker.poll() is None:
            worker.terminate()
    for worker in workers:
        worker.wait()


def count_gpus() -> int:
    """GPUs of NVIDIA in this machine; this process is to hold none of them."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return 0
    return len(listed.stdout.splitlines())


def gpu_of(index: int, processes: int, gpus: int) -> dict[str, str]:
    """Environment that gives a worker its GPU, and its share of it where workers share one."""
    if gpus == 0 or processes == 1:
        return {}
    sharing = -(-processes // gpus)
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / sharing:.2f}"} if sharing > 1 else {}
    return {"CUDA_VISIBLE_DEVICES": str(index % gpus), **memory}


def _follow(config: Config, workers: list[subprocess.Popen], end: float) -> None:
    """Prints each job as it ends, until all workers have or the time is over."""
    start, shown = time.time(), set((config.out / "jobs").glob("*.json"))
    running = True
    while running:
        states = [worker.poll() for worker in workers]
        for worker, state in zip(workers, states, strict=True):
            if state:
                fail_job_of(worker, config.out)
        running = None in states and time.time() < end
        for log in sorted(set((config.out / "jobs").glob("*.json")) - shown):
            shown.add(log)
            job = json.loads(log.read_text())
            line = f"{log.stem}: {job['outcome']}, {job['seconds']:.0f} s"
            print(f"[{time.time() - start:4.0f} s] {line}", flush=True)
        time.sleep(1 if running else 0)
    for index, worker in enumerate(workers):
        if worker.returncode:
            tail = (config.out / f"worker-{index}.log").read_text()[-2000:]
            print(f"worker {index} ended with {worker.returncode}:\n{tail}", flush=True)


def fail_job_of(worker: subprocess.Popen, out: pathlib.Path) -> None:
    """What a process was doing when it died has failed, so that the others do not wait for it."""
    for lock in (out / "locks").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another worker has just ended its job
            if lock.read_text() == str(worker.pid):
                reason = f"its process ended with {worker.returncode}"
                write_text(out / "failed" / f"{lock.name}.txt", f"{reason}\n")
                lock.unlink()


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
