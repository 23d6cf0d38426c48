"""The queue of jobs: what becomes of a job, and of the others, when a process or its GPU dies."""

import dataclasses
import os
import pathlib
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

from experiments.reproduction import processes, queue
from experiments.reproduction.files import read_json, write_text

ERROR = "INTERNAL: CUDA error: CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure"


_DEVICE_WORKS = queue.device_works


@dataclasses.dataclass(frozen=True)
class Job:
    kind: str
    name: str


class Paths(queue.Places):
    def product(self, job: Job) -> pathlib.Path:
        return self.root / job.name

    def done(self, job: Job) -> bool:
        return self.product(job).exists()


class EndedError(BaseException):
    """Instead of the end of the process."""


class Worker(queue.Queue[Paths]):
    """A process: job "fault" breaks its device, after which every job fails."""

    jobs = (Job("writing", "first"), Job("breaking", "fault"), Job("writing", "last"))
    works = True

    def wanted(self) -> list[Job]:
        return [job for job in self.jobs if not self.paths.done(job)]

    def device_works(self) -> bool:
        return self.works

    def _writing(self, job: Job) -> None:
        if not self.works:
            raise jax.errors.JaxRuntimeError(ERROR)
        write_text(self.paths.product(job), "")

    def _breaking(self, job: Job) -> None:
        self.works = False
        raise jax.errors.JaxRuntimeError(ERROR)


@pytest.fixture
def started(tmp_path, monkeypatch):
    """Runs a process to its end; returns its exit status, 0 if no job is left."""
    monkeypatch.setattr(queue, "device_works", lambda: worker.device_works())

    def end(status: int) -> None:
        raise EndedError(status)

    monkeypatch.setattr(queue.os, "_exit", end)

    def start(kind: type[Worker] = Worker) -> int:
        nonlocal worker
        worker = kind(Paths(tmp_path), deadline=np.inf)
        try:
            worker.work()
        except EndedError as ended:
            return ended.args[0]
        return 0

    worker: Worker
    return start


def test_a_process_whose_device_died_gives_its_job_back_and_ends(tmp_path, started, capsys):
    assert started() == queue.DEVICE_DIED
    assert "another process" in capsys.readouterr().out.splitlines()[-1]
    paths = Paths(tmp_path)
    assert [paths.done(job) for job in Worker.jobs] == [True, False, False]
    assert not list((tmp_path / "locks").iterdir())
    assert not (tmp_path / "failed").exists()
    assert read_json(paths.log(Worker.jobs[1]))["outcome"] == "device died"

    # The second process that it kills is the last one, and the third does what is left.
    assert started() == queue.DEVICE_DIED
    assert ERROR in paths.failure(Worker.jobs[1]).read_text().splitlines()[-1]
    assert started() == 0
    assert [paths.done(job) for job in Worker.jobs] == [True, False, True]


def test_a_job_that_another_process_can_do_has_not_failed(tmp_path, started):
    class Lucky(Worker):
        _breaking = Worker._writing

    assert started() == queue.DEVICE_DIED
    assert started(Lucky) == 0
    assert all(Paths(tmp_path).done(job) for job in Worker.jobs)
    assert not (tmp_path / "failed").exists()


def test_what_was_given_back_is_left_alone(tmp_path, started, monkeypatch):
    """Another process takes the job at once, while the dead one still ends."""

    def given_and_taken(root, job, reason):
        give_back(root, job, reason)
        (root / "locks" / job).write_text("another process")

    give_back = queue.give_back
    monkeypatch.setattr(queue, "give_back", given_and_taken)
    assert started() == queue.DEVICE_DIED
    paths = Paths(tmp_path)
    assert paths.lock(Worker.jobs[1]).read_text() == "another process"
    assert read_json(paths.log(Worker.jobs[1]))["outcome"] == "device died"


def test_an_error_on_a_device_that_works_fails_its_job_alone(tmp_path, started):
    class Sound(Worker):
        def device_works(self):
            return _DEVICE_WORKS()

    assert started(Sound) == 0
    paths = Paths(tmp_path)
    assert paths.failure(Worker.jobs[1]).exists()
    assert not (tmp_path / "died").exists()


def test_a_device_is_dead_if_the_smallest_program_fails(monkeypatch):
    assert queue.device_works()

    def fails(error):
        def block(*_):
            raise jax.errors.JaxRuntimeError(error)

        monkeypatch.setattr(jax, "device_get", block)
        return not queue.device_works()

    assert fails(ERROR)
    assert not fails("RESOURCE_EXHAUSTED: Out of memory")  # what fills it is freed in time


def dead(status: int) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
    process.wait()
    return process


def test_a_job_that_two_processes_died_of_has_failed(tmp_path):
    """Others would wait for it for ever."""
    for process, again in ((dead(3), True), (dead(4), False)):
        for name, owner in (("data-0", process.pid), ("data-1", process.pid + 1)):
            write_text(tmp_path / "locks" / name, str(owner))
        assert processes.give_back_job_of(process, tmp_path) == ["data-0"]
        assert [lock.name for lock in (tmp_path / "locks").iterdir()] == ["data-1"]
        assert (tmp_path / "failed").exists() is not again
    failure = (tmp_path / "failed" / "data-0.txt").read_text()
    assert all(f"ended with {status}" in failure for status in (3, 4))


def test_a_process_that_died_is_started_again_while_there_is_time(tmp_path, monkeypatch, capfd):
    """Of two jobs one kills every process, the other is done by the third."""
    code = """
        import os, pathlib
        def worker(root, deadline):
            root = pathlib.Path(root)
            (root / "starts").open("a").write("x")
            for name in ("bad", "good"):
                if not (root / "failed" / f"{name}.txt").exists():
                    (root / "locks").mkdir(exist_ok=True)
                    (root / "locks" / name).write_text(str(os.getpid()))
                    if name == "bad":
                        os._exit(70)
                    (root / name).touch()
    """
    (tmp_path / "dying.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(processes, "visible_gpus", list)
    monkeypatch.setattr(processes, "_POLL_SECONDS", 0.02)
    processes.run_workers("dying", tmp_path, 1, time.time() + 60)
    assert (tmp_path / "starts").read_text() == "xxx"
    assert (tmp_path / "good").exists()
    assert (tmp_path / "failed" / "bad.txt").exists()
    assert "started again" in capfd.readouterr().out

    # One that cannot even begin is not, nor is any when the time is over.
    (tmp_path / "dying.py").write_text("def worker(*_): raise SystemExit(1)")
    processes.run_workers("dying", tmp_path, 1, time.time() + 60)
    assert "ended with 1" in capfd.readouterr().out
    (tmp_path / "dying.py").write_text(textwrap.dedent(code))
    (tmp_path / "failed" / "bad.txt").unlink()
    processes.run_workers("dying", tmp_path, 1, time.time() - 1)
    assert (tmp_path / "starts").read_text() == "xxxx"
