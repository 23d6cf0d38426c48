"""The host's part of a turn: real calls of the engine, with programs that compute nothing."""

import json

import pytest

from dms_jax.generation import programs
from dms_jax.generation.compiling import Program
from experiments.benchmarks import engine_host as script
from tests.support.instances import further


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
    script.main(script.Config(lanes=4, requests=9, clients=clients, runs=1, profile=True, out=out))
    found = json.loads(out.read_text())["milliseconds"]
    assert found["to_prompts"]["count"] >= 2
    assert found["to_steps"]["count"] >= 2
    assert found["turn"]["median"] > 0
    assert found["functions"]["reporting.py:settle"] < found["functions"]["engine.py:serve"]
    assert (programs.extend, programs.decode, Program.__call__) == before
