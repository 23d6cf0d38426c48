"""SIGKILLs at random moments: the end of the run is the bits of the run that nothing interrupted.

    python -m tests.training.killing --processes 2 --kills 5 --steps 40 --seed 0

Kills one process of the run, then the others as a launcher would, starts the same command again,
and prints a line of figures for each kill, and what the end is.
"""

import argparse
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXPORT = "model/model.safetensors"
DEVICES = 8


def start(told: dict[str, Any], count: int) -> list[subprocess.Popen[str]]:
    """Starts the processes of a run, eight devices between them."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for index in range(count):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(DEVICES // count),
            "PYTHONPATH": str(ROOT),
        }
        if count > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(index),
            }
        command = [sys.executable, "-m", "tests.training.one_of_two", json.dumps(told)]
        started.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environment,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    return started


def finish(started: list[subprocess.Popen[str]]) -> str:
    """Waits for the processes of a run; returns what they printed, and raises if one failed."""
    try:
        printed = "\n".join(each.communicate(timeout=600)[0] for each in started)
    finally:
        for each in started:
            each.kill()
    if any(each.returncode for each in started):
        raise RuntimeError(printed)
    return printed


def kill_at(started: list[subprocess.Popen[str]], steps: int, seconds: float, victim: int) -> str:
    """Kills a process some seconds after its steps were printed; returns the last line of it."""
    stream = started[victim].stdout
    assert stream is not None
    line = seen = ""
    while steps and (line := stream.readline()):
        if line.startswith("step"):
            steps, seen = steps - 1, line.strip()
    time.sleep(seconds)
    started[victim].kill()
    for each in started:
        each.kill()
        each.communicate()
    return seen


def losses(out: pathlib.Path) -> list[tuple[int, float]]:
    """The steps and losses of the log."""
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def compare(folder: pathlib.Path, *, processes: int, kills: int, steps: int, seed: int) -> bool:
    """Makes an uninterrupted and a killed run; returns whether they end in the same bits."""
    whole, killed = folder / "whole", folder / "killed"
    common: dict[str, Any] = dict(mesh=[4, 2], steps=steps, every=2)
    finish(start({"out": str(whole)} | common, processes))
    moments = random.Random(seed)
    for number in range(kills):
        started = start({"out": str(killed)} | common, processes)
        after, delay = moments.randrange(steps // (kills + 1) + 1), moments.random() * 0.5
        seen = kill_at(started, after, delay, moments.randrange(processes))
        place = killed / "checkpoints"
        left = sorted(path.name for path in place.iterdir()) if place.exists() else []
        print(f"kill {number + 1}: {delay:.2f} s after {seen or 'the start'}; left {left}")
    finish(start({"out": str(killed)} | common, processes))
    same = (killed / EXPORT).read_bytes() == (whole / EXPORT).read_bytes()
    return same and losses(killed) == losses(whole)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("processes", 1), ("kills", 5), ("steps", 40), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    told = vars(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        same = compare(pathlib.Path(folder), **told)
    print(f"{told}: the end is {'the same bits' if same else 'NOT the same'}")
    sys.exit(not same)


if __name__ == "__main__":
    main()
