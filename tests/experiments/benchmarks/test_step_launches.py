"""What is counted in a profiler's trace of decode steps."""

import gzip
import json

from experiments.benchmarks import step_launches as script


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
    processes = {1: "/device:GPU:0", 2: "/host:CPU"}
    names = [
        dict(ph="M", pid=pid, name="process_name", args={"name": name})
        for pid, name in processes.items()
    ]
    with gzip.open(tmp_path / "vm.trace.json.gz", "wt") as file:
        json.dump({"traceEvents": events[::-1] + names}, file)
    found = script.device_events(tmp_path)
    assert len(found) == 11
    figures = script.summarise(found, steps=2, num_layers=2)
    assert figures["launches_a_step"] == 5
    assert figures["launches_a_layer"] == 2
    assert figures["busy_ms"] == 0.05  # 20 a layer and 10 at the end, of 100
    assert figures["busy_share"] == 0.5
    assert [each["name"] for each in figures["families"]] == [
        "nvjet_tst_h",
        "loop_add_fusion",
        "argmax",
    ]


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
    assert figures["launches_a_step"] == 0
    assert figures["step_ms"] > 0
    assert json.loads(config.out.read_text()) == figures
