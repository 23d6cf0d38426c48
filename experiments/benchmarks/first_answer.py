r"""Times how long a user of a new process waits: for a first answer, and for a server to be ready.

Each row is a process of its own with a checkpoint directory. `generate` imports the library, loads
the model and asks twice; `apart` does so with the device started alone, before the model is loaded,
and has a profile of what follows; `serve` is `dms-jax serve`, and then one completion. "cold" is
the first process with an empty cache of compiled programs, "warm" are those that follow it. All
seconds are since the process was started, but those of the second call, since it was asked. The
files are read once before, so they come from memory.

    python -m experiments.benchmarks.first_answer --model path/to/model
    python -m experiments.benchmarks.first_answer --model path/to/model --policy TOVA \
        --server="--policy TOVA --lanes 32 --max-tokens 4096"
"""

import dataclasses
import functools
import http.client
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

import dms_jax
from dms_jax.command_line.options import check_names
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.compilation import SWITCH
from experiments.benchmarks.serving import model_name, started
from experiments.benchmarks.settings import check_numbers

LONGEST = 600  # seconds that a process may take
# Its arguments are the model, the policy ("" for its own), the prompt, the number of new tokens,
# and "apart" for a profile. Times are those of the system's clock, which other processes share.
SCRIPT = """
import time
marks = {"python": time.time()}
import cProfile, json, pstats, sys
import dms_jax
from dms_jax import compilation
marks["imported"] = time.time()
path, policy, prompt, count, apart = sys.argv[1:]
profile = cProfile.Profile()
if apart:
    import jax
    jax.devices()
    marks["device"] = time.time()
    profile.enable()
model = dms_jax.load(path)
marks["loaded"] = time.time()

def ask():
    told = []
    completion = dms_jax.generate(
        model,
        [prompt if model.tokenizer else list(range(1, 33))],
        policy=policy or None,
        sampling=dms_jax.Sampling(temperature=0, max_new_tokens=int(count)),
        on_tokens=lambda update: told.append(time.time()),
    )
    return told[0], time.time(), completion.tokens[0]

with compilation.watched() as made:
    marks["first_token"], marks["answered"], tokens = ask()
profile.disable()
found = sorted(pstats.Stats(profile).stats.items(), key=lambda each: -each[1][3]) if apart else []
start = time.time()
first, whole, again = ask()
marks |= {"second_first_token": first - start, "second_answered": whole - start}
assert again == tokens
print(json.dumps({"marks": marks, "compiled": made.compiled, "read": made.read,
                  "seconds_of_programs": made.seconds, "tokens": tokens,
                  "profile": [f"{spent[3]:.3f} s  {'/'.join(file.split('/')[-3:])}:{line} {name}"
                              for (file, line, name), spent in found[:60]]}))
"""
SINCE_ASKED = ("second_first_token", "second_answered")


@dataclasses.dataclass(frozen=True)
class Config:
    """Time the first answers of new processes."""

    model: str
    """Checkpoint directory or hub id."""
    policy: str | None = None
    """Cache policy of `generate`; the checkpoint's own unless given."""
    prompt: str = "Write a function that returns the n-th Fibonacci number."
    """What is asked."""
    new_tokens: int = 64
    """Length of an answer."""
    server: str = ""
    """Options of `dms-jax serve` as they are typed, behind an equals sign: --server="--lanes 8"."""
    warm: int = 3
    """Processes of each kind behind the first one."""
    only: tuple[str, ...] = ("generate", "apart", "serve")
    """What is timed."""
    out: pathlib.Path = pathlib.Path("runs/first_answer.json")
    """JSON file for the figures, which are written after every process."""

    def __post_init__(self):
        check_numbers(self)


def timed_answer(
    config: Config, environment: Mapping[str, str], *, apart: bool = False
) -> dict[str, Any]:
    """Runs a process that asks twice; returns its seconds, programs, tokens and profile.

    Raises:
      DmsJaxError: it failed.
    """
    words = (config.model, config.policy or "", config.prompt, str(config.new_tokens))
    words += ("apart" if apart else "",)
    start = time.time()
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=LONGEST,
    )
    ended = time.time() - start
    if done.returncode:
        raise dms_jax.DmsJaxError(f"A process has failed: {done.stderr[-2000:]}")
    found = json.loads(done.stdout.splitlines()[-1])
    seconds = {
        name: round(mark - (0 if name in SINCE_ASKED else start), 3)
        for name, mark in found.pop("marks").items()
    }
    return {"seconds": seconds | {"ended": round(ended, 3)}, **found}


def timed_server(config: Config, environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs a server; returns the seconds until it was ready, and until it had answered a chat."""
    start = time.time()
    with started(f"--model {config.model} {config.server}", environment) as address:
        ask(address, "GET", "/v1/models")
        ready = time.time() - start
        words = {"prompt": config.prompt, "max_tokens": config.new_tokens, "temperature": 0}
        ask(address, "POST", "/v1/completions", {"model": model_name(address)} | words)
        answered = time.time() - start
    return {"seconds": {"ready": round(ready, 3), "answered": round(answered, 3)}}


def ask(address: str, method: str, path: str, body: Any = None) -> Any:
    """Returns the answer of a server to one request.

    Raises:
      DmsJaxError: it is no success.
    """
    place = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=LONGEST)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise dms_jax.DmsJaxError(f"{path}: {answer.status} {content[:500]!r}")
        return content
    finally:
        connection.close()


TIMED: dict[str, Callable[[Config, Mapping[str, str]], dict[str, Any]]] = {
    "generate": timed_answer,
    "apart": functools.partial(timed_answer, apart=True),
    "serve": timed_server,
}


def medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median seconds of the rows of each kind."""
    kinds = {f"{row['what']}, {row['cache']}": [] for row in rows}
    for row in rows:
        kinds[f"{row['what']}, {row['cache']}"].append(row["seconds"])
    return {
        kind: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for kind, found in kinds.items()
    }


def main(config: Config) -> dict[str, Any]:
    """Runs the processes one after the other; writes the figures as they come, and returns them."""
    check_names("--only", config.only, TIMED)
    make_place("--out", config.out)
    for file in pathlib.Path(config.model).glob("*.safetensors"):
        file.read_bytes()
    rows: list[dict[str, Any]] = []
    report: dict[str, Any] = {"rows": rows}
    for what in config.only:
        with tempfile.TemporaryDirectory() as place:
            given = {name: value for name, value in os.environ.items() if "JAX_COMP" not in name}
            for number in range(1 + config.warm):
                row = TIMED[what](config, given | {SWITCH: place})
                rows.append({"what": what, "cache": "warm" if number else "cold", **row})
                print(f"{what}, {rows[-1]['cache']}: {json.dumps(row['seconds'])}", flush=True)
                write_json(config.out, report | {"medians": medians(rows)})
    # At last: it starts the device, which the processes had for themselves.
    report = provenance(config) | {"cores": os.cpu_count(), "medians": medians(rows)} | report
    write_json(config.out, report)
    return report


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
