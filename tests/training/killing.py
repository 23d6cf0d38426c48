"""SIGKILLs at random moments: the run still equals an uninterrupted one bit for bit.

    python -m tests.training.killing --processes 2 --kills 5 --steps 40 --seed 0

Draws moments over all steps of the run: a step, plus up to half a second, in which later steps are
computed and checkpoints and exports are written. Kills one process of the run, then the others as a
launcher would, and restarts the same command. Prints a line of figures for each kill, and whether
the final state and all exports are equal.
"""

import argparse
import datetime
import json
import os
import pathlib
import random
import socket
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXPORT = "model/model.safetensors"
RATIOS = [1.5, 2, 3]  # of exports during training
DEVICES = 8


def start(told: dict[str, Any], count: int, devices: int = DEVICES) -> list[subprocess.Popen[str]]:
    """Starts the processes of a run, with so many devices in total."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    started = []
    for index in range(count):
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(devices // count),
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
    """Waits for the processes of a run; returns their output, and raises if one failed."""
    try:
        printed = "\n".join(each.communicate(timeout=600)[0] for each in started)
    finally:
        for each in started:
            each.kill()
    if any(each.returncode for each in started):
        raise RuntimeError(printed)
    return printed


def kill_at(started: list[subprocess.Popen[str]], step: int, seconds: float, victim: int) -> str:
    """Kills a process some seconds after it printed a step; returns the last step it printed.

    0 is the start. A run that resumes from a later step is killed after its first step.
    """
    stream = started[victim].stdout
    assert stream is not None
    seen = ""
    while step and (line := stream.readline()):
        if line.startswith("step"):
            seen = line.strip()
            if int(seen.split()[1]) >= step:
                break
    time.sleep(seconds)
    started[victim].kill()
    for each in started:
        each.kill()
        rest = each.communicate()[0]
        if each is started[victim]:
            seen = next((x for x in reversed(rest.splitlines()) if x.startswith("step")), seen)
    return seen


def moments(steps: int, kills: int, seed: int) -> list[tuple[int, float]]:
    """Returns the steps after which the run is killed, in order, and the further seconds."""
    random_moments = random.Random(seed)
    drawn = sorted(random_moments.sample(range(steps), kills))
    return [(step, 0.5 * random_moments.random()) for step in drawn]


def losses(out: pathlib.Path) -> list[tuple[int, float]]:
    """The steps and losses of the log."""
    lines = map(json.loads, (out / "log.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def compare(
    folder: pathlib.Path, *, processes: int, kills: int, steps: int, seed: int
) -> tuple[bool, list[dict[str, Any]]]:
    """Makes an uninterrupted and a killed run.

    Returns whether their results are bit-equal, and each kill with its remaining checkpoints.
    """
    whole, killed = folder / "whole", folder / "killed"
    common: dict[str, Any] = dict(mesh=[4, 2], steps=steps, every=2, snapshots=RATIOS)
    finish(start({"out": str(whole)} | common, processes))
    victims = random.Random(seed)
    killings: list[dict[str, Any]] = []
    for number, (step, delay) in enumerate(moments(steps, kills, seed), 1):
        started = start({"out": str(killed)} | common, processes)
        victim = victims.randrange(processes)
        seen = kill_at(started, step, delay, victim)
        place = killed / "checkpoints"
        left = sorted((path.name for path in place.iterdir()), key=len) if place.exists() else []
        killings.append(
            dict(
                process=victim,
                seconds_after_step=round(delay, 2),
                step=step,
                reached=int(seen.split()[1]) if seen else 0,
                left=left,
            )
        )
        print(
            f"kill {number} of process {victim}: {delay:.2f} s after step {step}, at "
            f"{seen or 'the start'}; left {left}",
            flush=True,
        )
    after_one = sum(any(name.isdigit() for name in each["left"]) for each in killings)
    print(f"{after_one} of {kills} kills came after a checkpoint", flush=True)
    finish(start({"out": str(killed)} | common, processes))
    exports = [EXPORT, *(f"snapshots/{ratio:g}/model.safetensors" for ratio in RATIOS)]
    same = all((killed / each).read_bytes() == (whole / each).read_bytes() for each in exports)
    return same and losses(killed) == losses(whole), killings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("processes", 1), ("kills", 5), ("steps", 40), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=pathlib.Path, help="JSON file that the record is added to")
    told = vars(parser.parse_args())
    out = told.pop("out")
    with tempfile.TemporaryDirectory() as folder:
        same, killings = compare(pathlib.Path(folder), **told)
    end = "the same bits" if same else "NOT the same"
    print(f"{told}: the end is {end}")
    if out is not None:
        options = " ".join(f"--{name} {value}" for name, value in told.items())
        record = dict(
            command=f"python -m tests.training.killing {options}",
            device="CPU, 8 devices over all processes",
            jax=metadata.version("jax"),
            date=datetime.date.today().isoformat(),
            kills=killings,
            exports=["at the end", *RATIOS],
            end=end,
        )
        records = json.loads(out.read_text()) if out.exists() else []
        out.write_text(json.dumps([*records, record], indent=1) + "\n")
    sys.exit(not same)


if __name__ == "__main__":
    main()
