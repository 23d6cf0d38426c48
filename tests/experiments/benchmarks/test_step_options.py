"""Steps under other compiler options: what is timed, that it is compiled anew, what is written."""

import json

import pytest

from dms_jax.cache import pool
from dms_jax.generation import programs
from dms_jax.generation.runner import Runner
from experiments.benchmarks import step_options as script
from pallas_kernels import tuned
from pallas_kernels.decode import gpu
from pallas_kernels.dispatch import DEFAULT_GPU


@pytest.mark.nightly
def test_variants_take_turns_and_leave_no_trace(monkeypatch, tmp_path):
    before = programs.decode, pool.rotate_and_write, Runner.decode
    made, written = [], []
    named = {each.name: each for each in script.VARIANTS}
    chosen = named["XLA's defaults"], named["XLA's defaults and scatters"]
    monkeypatch.setattr(script, "VARIANTS", chosen)
    monkeypatch.setattr(script.decode_steps, "read_rate", lambda: 1e9)
    program_of = script.program_of
    monkeypatch.setattr(
        script, "program_of", lambda options: made.append(program_of(options)) or made[-1]
    )

    def rotate_and_write(*args, implementation=None, **more):
        written.append(implementation)
        return before[1](*args, implementation=implementation, **more)

    monkeypatch.setattr(pool, "rotate_and_write", rotate_and_write)
    config = script.Config(
        shape="tiny",
        batch=2,
        context=192,
        window=16,
        ratios=(4,),
        chunk=4,
        repeats=1,
        turns=2,
        dtype="float32",
        out=tmp_path / "options.json",
    )
    kernel, scatters = script.main(config)
    assert [len(row["step_ms"]) for row in (kernel, scatters)] == [2, 2]
    assert kernel["same_tokens"] == scatters["same_tokens"] == 1
    # Each variant is traced once, the second one with the write that its name says.
    assert set(written) == {None, "xla"}
    assert len(made) == 2
    assert json.loads((tmp_path / "options.json").read_text())["rows"] == [kernel, scatters]
    monkeypatch.undo()
    assert (programs.decode, pool.rotate_and_write, Runner.decode) == before


def test_settings_by_heuristic_are_those_without_a_file(monkeypatch):
    look_up, used = tuned.lookup, {}
    monkeypatch.setattr(gpu, "target_gpu", lambda: DEFAULT_GPU)
    shape = gpu.Shape(rows=256, head_dim=64, page_size=64, columns=64, dtype="float8_e4m3fn")
    for settings in (script.HEURISTIC, script.MEASURED):
        with script.using(programs.decode, script.KERNEL, settings):
            used[settings] = gpu.settings_of("mosaic_gpu", shape)
    assert used == {
        script.HEURISTIC: {"programs_per_core": 2, "stages": 4},
        script.MEASURED: {"programs_per_core": 2, "stages": 3},
    }
    assert tuned.lookup is look_up
