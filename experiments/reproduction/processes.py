"""The processes of a run: each has its GPU, all share one cache of compiled programs."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from experiments.reproduction.files import give_back

CHECKOUT = pathlib.Path(__file__).resolve().parents[2]
DEVICE_DIED = 70  # exit status of a worker that can compute nothing any more
_POLL_SECONDS = 1.0
_GRACE_SECONDS = 40  # after the deadline, to end what was begun


def run_workers(
    module: str, out: pathlib.Path, processes: int, deadline: float, **own: Any
) -> None:
    """Starts processes, each on its own GPU where there are several, and waits for them.

    Args:
      module: the module whose `worker(root, deadline)` a process calls.
      out: the run directory, where the plan is.
      processes: how many there are.
      deadline: seconds since the epoch after which nothing new is begun.
      own: settings of these processes that are not the plan's, plain values, for `worker`.
    """
    program = f"from {module} import worker; worker({str(out)!r}, {deadline}, **{own!r})"
    gpus = visible_gpus()
    environments = [
        environment(out, gpu_of(index, processes, gpus)) | place_of(index, processes, gpus)
        for index in range(processes)
    ]
    logs = [(out / f"worker-{index}.log").open("a") for index in range(processes)]

    def start(index: int) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-c", program],
            env=environments[index],
            stdout=logs[index],
            stderr=subprocess.STDOUT,
        )

    workers: list[subprocess.Popen] = []
    try:
        workers += map(start, range(processes))
        _follow(out, workers, start, deadline)
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


def visible_gpus() -> list[str]:
    """NVIDIA's GPUs that this process may give to others; it is to hold none of them itself."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [name for name in chosen.split(",") if name]
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return []
    return [str(number) for number in range(len(listed.stdout.splitlines()))]


def gpu_of(index: int, processes: int, gpus: list[str]) -> dict[str, str]:
    """Environment that gives a worker its GPU, and its share of it where workers share one."""
    if not gpus or processes == 1:
        return {}
    sharing = -(-processes // len(gpus))
    memory = {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{0.9 / sharing:.2f}"} if sharing > 1 else {}
    return {"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)], **memory}


def place_of(index: int, processes: int, gpus: list[str]) -> dict[str, str]:
    """Environment that tells a worker its place among those of its GPU, and how many they are.

    # index: 4, processes: 7, gpus: 4  Out: {"GPU_PLACE": "1/2"}     index: 3  {"GPU_PLACE": "0/1"}
    """
    count = max(1, len(gpus))
    place, own = index // count, len(range(index % count, processes, count))
    return {"GPU_PLACE": f"{place}/{own}"} if gpus else {}


def own_place() -> tuple[int, int]:
    """Place of this worker among those of its GPU, and how many they are; (0, 1) if it is alone."""
    place, _, own = os.environ.get("GPU_PLACE", "0/1").partition("/")
    return int(place), int(own)


def _follow(
    out: pathlib.Path,
    workers: list[subprocess.Popen],
    start: Callable[[int], subprocess.Popen],
    deadline: float,
) -> None:
    """Prints each job as it ends, until all workers have or the time is over.

    A worker that died at a job is replaced while there is time; its job goes back to the queue.
    """
    began, shown = time.time(), set((out / "jobs").glob("*.json"))
    ended: set[subprocess.Popen] = set()
    running = True
    while running:
        for index, worker in enumerate(workers):
            if not worker.poll() or worker in ended:
                continue
            ended.add(worker)
            died_at = give_back_job_of(worker, out)
            died = worker.returncode == DEVICE_DIED or bool(died_at)
            if died and time.time() < deadline:
                workers[index] = start(index)
                what = f"at {died_at[0]} " if died_at else ""
                print(
                    f"worker {index} ended {what}with {worker.returncode}; it is started again",
                    flush=True,
                )
        states = [worker.poll() for worker in workers]
        running = None in states and time.time() < deadline + _GRACE_SECONDS
        for log in sorted(set((out / "jobs").glob("*.json")) - shown):
            shown.add(log)
            job = json.loads(log.read_text())
            line = f"{log.stem}: {job['outcome']}, {job['seconds']:.0f} s"
            print(f"[{time.time() - began:4.0f} s] {line}", flush=True)
        time.sleep(_POLL_SECONDS if running else 0)
    for index, worker in enumerate(workers):
        if worker.returncode:
            tail = (out / f"worker-{index}.log").read_text()[-2000:]
            print(f"worker {index} ended with {worker.returncode}:\n{tail}", flush=True)


def give_back_job_of(worker: subprocess.Popen, out: pathlib.Path) -> list[str]:
    """Frees what a process was doing when it died, so that the others do not wait for it."""
    names = []
    for lock in (out / "locks").glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another worker has just ended its job
            if lock.read_text() == str(worker.pid):
                give_back(out, lock.name, f"its process ended with {worker.returncode}")
                names.append(lock.name)
    return names
