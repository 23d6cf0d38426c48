"""The host's part of a turn: real calls of the engine, with programs that compute nothing."""

import json
import pathlib
import subprocess
import sys

import pytest

from dms_jax.generation import programs
from dms_jax.generation.compiling import Program
from experiments.benchmarks import engine_host as script
from tests.support.instances import further

ROOT = pathlib.Path(__file__).parents[3]


def test_a_turn_is_split_at_its_launches():
    marks = script.Marks()
    marks.events = [
        *(("extend", 0.0), ("first_tokens", 0.001), ("decode", 0.002)),  # no chunk before
        *(("chunk", 1.0), ("extend", 1.003), ("extend", 1.005), ("decode", 1.010)),
        *(("decode", 1.5), ("chunk", 2.0), ("decode", 2.004), ("chunk", 3.0)),
    ]
    found = marks.take()
    assert found["to_prompts"] == pytest.approx([3])
    assert found["prompts_to_steps"] == pytest.approx([7])
    assert found["to_steps"] == pytest.approx([4])
    assert marks.events == []


@pytest.mark.parametrize("clients", [None, *further(3)])
def test_calls_run_to_their_end_without_a_model(clients, tmp_path):
    out = tmp_path / "host.json"
    before = programs.extend, programs.decode, Program.__call__
    script.main(script.Config(lanes=4, requests=9, clients=clients, runs=1, out=out))
    found = json.loads(out.read_text())["milliseconds"]
    assert found["to_prompts"]["count"] >= 2
    assert found["to_steps"]["count"] >= 2
    assert found["turn"]["median"] > 0
    assert (programs.extend, programs.decode, Program.__call__) == before


@pytest.mark.nightly
def test_a_function_takes_what_those_that_it_calls_take(tmp_path):
    """In a process of its own: cProfile counts the calls of all threads, and this one has some."""
    out = tmp_path / "host.json"
    settings = ["--lanes", "4", "--requests", "9", "--clients", "3", "--runs", "1", "--profile"]
    call = [sys.executable, "-m", script.__name__, *settings, "--out", str(out)]
    subprocess.run(call, cwd=ROOT, check=True, capture_output=True, text=True, timeout=300)
    functions = json.loads(out.read_text())["milliseconds"]["functions"]
    assert functions["engine.py:serve"] > functions["engine.py:_run"]
    assert functions["engine.py:_run"] > functions["engine.py:_read"]
    assert functions["engine.py:_run"] > functions["reporting.py:settle"]
