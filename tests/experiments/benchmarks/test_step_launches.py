"""What is counted in a profiler's trace of decode steps."""

import gzip
import json

import jax
import jax.numpy as jnp
import pytest

from experiments.benchmarks import step_launches as script
from experiments.benchmarks import traces


def event(name, ts, dur, module="jit_decode", pid=1):
    return dict(ph="X", pid=pid, name=name, ts=ts, dur=dur, args={"hlo_module": module})


def test_launches_and_busy_time_are_counted(tmp_path):
    """Two steps of two layers: two kernels a layer, of which one overlaps, and one a step."""
    events = [event("loop_add_fusion", 0, 50, module="jit_clear")]
    for step in range(2):
        for layer in range(2):
            start = 100 + 100 * step + 30 * layer
            events.append(event(f"loop_add_fusion_{layer}", start, 10))
            events.append(event("nvjet_tst_64x40_64x16_2x4_h", start + 5, 15))
        events.append(event("argmax", 190 + 100 * step, 10))
    events.append(event("python", 0, 1000, pid=2))
    events.append(event("cuGraphLaunch", 0, 1000, pid=2))
    processes = {1: "/device:GPU:0", 2: "/host:CPU"}
    names = [
        dict(ph="M", pid=pid, name="process_name", args={"name": name})
        for pid, name in processes.items()
    ]
    with gzip.open(tmp_path / "vm.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events[::-1] + names}, file)
    trace = traces.read(tmp_path)
    assert len(trace.kernels) == 11
    assert trace.calls == {"cuGraphLaunch": 1}
    kernels = trace.of("decode")
    assert script.launches_a_layer(kernels, steps=2, num_layers=2) == 2
    figures = traces.summarise(kernels, runs=2)
    assert figures["launches"] == 5
    assert figures["busy_ms"] == 0.05  # 20 a layer and 10 at the end, of 100
    assert figures["busy_share"] == 0.5
    assert figures["families"] == [
        dict(name="argmax", launches=1, us=10, wait_us=40),
        dict(name="loop_add_fusion", launches=2, us=20, wait_us=10),
        dict(name="nvjet_tst_h", launches=2, us=30, wait_us=0),
    ]
    assert figures["in_order"][0] == ("loop_add_fusion_0", 10, 0)
    assert list(trace.programs()) == ["decode", "clear"]


@pytest.mark.nightly
def test_what_runs_in_a_context_is_profiled():
    with traces.traced() as trace:
        jax.block_until_ready(jax.jit(jnp.sin)(1.0))
    assert trace.kernels == []  # no GPU


@pytest.mark.nightly
def test_where_no_gpu_is_nothing_is_counted(tmp_path):
    config = script.Config(
        shape="tiny",
        batch=2,
        context=192,
        ratio=1,
        chunk=4,
        repeats=1,
        dtype="float32",
        out=tmp_path / "launches.json",
    )
    figures = script.main(config)
    assert figures["profiled_step"]["launches"] == 0
    assert figures["step_ms"] > 0
    assert figures["share_of_roofline"] > 0
    assert json.loads(config.out.read_text()) == figures
