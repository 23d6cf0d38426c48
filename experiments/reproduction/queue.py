"""A queue of jobs that several processes take from; what is done is on disk.

A job is done when its files are there, so that nothing is repeated and a run can be cut off
anywhere. A lock, made by one process alone, says who does a job.

After some errors of a GPU every later program of its process fails too. Such a process gives its
job back, for one more process to try, and ends; `processes` starts another one in its place.
On H200s with CUDA 13.0 and jax 0.11.2 it happens where two processes share a GPU: decoding beside
one that multiplies large matrices ended so within a minute in four of five tries. The core dump
that was read shows an illegal instruction inside a product of cuBLAS
(`nvjet_sm90_tst_64x72_64x12_2x4`), without programmatic launches too. With one process a GPU it
was not seen.
"""

import os
import pathlib
import time
import traceback
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from dms_jax.devices import out_of_memory
from experiments.reproduction.files import (
    give_back,
    provenance,
    read_json,
    write_json,
    write_text,
)
from experiments.reproduction.processes import DEVICE_DIED


class OutOfTimeError(Exception):
    """The deadline has passed; what is done is on disk."""


class Named(Protocol):
    """A job: `kind` names the method that does it, `name` its files."""

    @property
    def kind(self) -> str: ...

    @property
    def name(self) -> str: ...


class Places:
    """Where the files of jobs are, and what a job waits for.

    Args:
      root: the run directory.
    """

    def __init__(self, root: pathlib.Path):
        self.root = root

    def log(self, job: Any) -> pathlib.Path:
        """How a job ended, and what it took."""
        return self.root / "jobs" / f"{job.name}.json"

    def lock(self, job: Any) -> pathlib.Path:
        """A file that is there while a process does the job; it holds the process's number."""
        return self.root / "locks" / job.name

    def failure(self, job: Any) -> pathlib.Path:
        """What a job failed of."""
        return self.root / "failed" / f"{job.name}.txt"

    def done(self, job: Any) -> bool:
        """Whether the files are there that a job is there to write."""
        raise NotImplementedError

    def ready(self, job: Any) -> bool:
        """Whether what a job needs is there."""
        return True


def device_works() -> bool:
    """Whether the smallest program still runs on the device of this process."""
    try:
        jax.device_get(jnp.arange(2) + 1)
    except jax.errors.JaxRuntimeError as error:
        return out_of_memory(error)  # that passes
    return True


class Queue[P: Places]:
    """One process that takes jobs until none is left; a job of kind K is done by the method `_K`.

    Args:
      paths: where the files are.
      deadline: seconds since the epoch after which nothing new is begun.
    """

    def __init__(self, paths: P, deadline: float):
        self.paths, self.deadline = paths, deadline

    def wanted(self) -> list[Any]:
        """The jobs that are not done yet, in the order in which they are begun."""
        raise NotImplementedError

    def work(self) -> None:
        """Takes jobs until none is left that this process could do."""
        while time.time() < self.deadline:
            open_jobs = [job for job in self.wanted() if not self.paths.failure(job).exists()]
            job = next(filter(self._take, filter(self.paths.ready, open_jobs)), None)
            if job is not None:
                self._do(job)
            elif any(not self.paths.lock(job).exists() for job in open_jobs) and self._busy():
                time.sleep(0.5)  # for what others are making
            else:
                return

    def _busy(self) -> bool:
        folder = self.paths.root / "locks"
        return folder.is_dir() and any(folder.iterdir())

    def _take(self, job: Named) -> bool:
        """Locks a job for this process; False if another has it, or has just done it."""
        lock = self.paths.lock(job)
        lock.parent.mkdir(parents=True, exist_ok=True)
        try:
            with lock.open("x") as file:
                file.write(str(os.getpid()))
        except FileExistsError:
            return False
        if self.paths.done(job):
            lock.unlink()
            return False
        return True

    def _do(self, job: Named) -> None:
        start = time.time()
        print(f"{job.name}: begins", flush=True)
        outcome, reason = "done", ""
        try:
            getattr(self, f"_{job.kind}")(job)
        except OutOfTimeError:
            outcome = "out of time"
        except KeyboardInterrupt:
            outcome, self.deadline = "stopped", 0  # nothing new is begun
        except Exception:  # another job may well succeed; the page tells of this one
            reason = traceback.format_exc()
            traceback.print_exc()
            outcome = "failed" if device_works() else "device died"
        except BaseException:
            self.paths.lock(job).unlink()
            raise
        seconds = time.time() - start
        before = read_json(self.paths.log(job)) or {"seconds": 0.0}
        record = {
            "outcome": outcome,
            "seconds": before["seconds"] + seconds,
            "device": jax.devices()[0].device_kind,
            **provenance(),
        }
        write_json(self.paths.log(job), record)
        print(f"{job.name}: {outcome}, {seconds:.0f} s", flush=True)
        # A job is freed last: from then on its files may be another process's.
        if outcome == "device died":
            print("The device of this process is dead: it ends, for another process.", flush=True)
            give_back(self.paths.root, job.name, reason)
            os._exit(DEVICE_DIED)  # at an ordinary end jax would wait for the device
        if outcome == "failed":
            write_text(self.paths.failure(job), reason)
        self.paths.lock(job).unlink()

    def check_time(self, *_: Any) -> None:
        """Raises OutOfTimeError after the deadline."""
        if time.time() > self.deadline:
            raise OutOfTimeError
