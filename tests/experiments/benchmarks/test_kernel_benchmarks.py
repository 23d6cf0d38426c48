"""Scripts that time kernels: what they do where there is no GPU, and what they write."""

import functools
import importlib
import json
import pathlib

import jax
import numpy as np
import pytest

import dms_jax
from experiments.benchmarks import kernel_timing as timing
from pallas_kernels.training.cases import TrainingCase

ROOT = pathlib.Path(__file__).resolve().parents[3]


@pytest.mark.parametrize(
    "name",
    [
        "decode_kernel",
        "prefill_kernel",
        "select_kernel",
        "training_kernels",
        "write_kernel",
        "tune_decode_kernel",
        "tune_training_kernels",
    ],
)
def test_without_a_gpu_there_is_nothing_to_time(tmp_path, name):
    script = importlib.import_module(f"experiments.benchmarks.{name}")
    out = tmp_path / "out"
    with pytest.raises(dms_jax.ConfigError, match="sees no GPU"):
        script.main(script.Config(out=out))
    assert not out.exists()


def test_figures_name_the_flags_of_xla(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_autotune_level=0")
    assert timing.environment()["xla_flags"] == "--xla_gpu_autotune_level=0"
    monkeypatch.delenv("XLA_FLAGS")
    assert "xla_flags" not in timing.environment()


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "unit"), [("select", "select_us"), ("write", "write_us")])
def test_every_case_is_checked_timed_and_written(monkeypatch, tmp_path, name, unit):
    """With the record of a GPU that takes 3 of 4 us a call, and an implementation that refuses."""
    script = importlib.import_module(f"experiments.benchmarks.{name}_kernel")
    events = [(4.0 * call, 3.0, "kernel") for call in range(timing.CALLS)]

    def device_events(run):
        run()
        return events

    monkeypatch.setattr(timing, "require_gpu", lambda: None)
    monkeypatch.setattr(timing, "device_events", device_events)
    case = next(one for one in script.cases.CONTRACT if one.name in ("width7", "base"))
    monkeypatch.setattr(script.cases, "BENCHMARK", (case,))
    monkeypatch.setattr(script, "IMPLEMENTATIONS", ("xla", "mosaic_gpu"))
    script.main(script.Config(out=tmp_path))
    report = json.loads((tmp_path / f"{name}.json").read_text())
    done, refused = report["records"]
    assert done["right"]
    assert done[unit] == pytest.approx(4 - 1 / timing.CALLS, abs=0.01)
    assert (done["kernels_us"], done["launches"]) == (3, 1)
    assert (refused["implementation"], refused["case"]) == ("mosaic_gpu", case.name)
    assert "failed" in refused
    # The committed report is of the same form.
    committed = json.loads((ROOT / "experiments/results/kernels" / f"{name}.json").read_text())
    assert committed["records"][0].keys() <= done.keys()
    assert committed.keys() <= report.keys()


@pytest.mark.parametrize("name", ["prefill_kernel", "training_kernels"])
def test_an_implementation_is_checked_against_the_reference(monkeypatch, name):
    """XLA's form stands for a kernel, and is off by bfloat16's rounding alone."""
    script = importlib.import_module(f"experiments.benchmarks.{name}")
    if name == "prefill_kernel":
        monkeypatch.setattr(script, "HEADS", 2)
        monkeypatch.setattr(script, "KV_HEADS", 1)
        errors = {"output": script.check(np.random.default_rng(3), 4, "xla")}
        kernel = functools.partial(script.check, np.random.default_rng(3), 4)
    else:
        case = TrainingCase("small", 1, 96, 2, 1, 64, 20)
        errors = script.check(case, jax.random.key(3), "xla")
        assert errors.pop("same_bits_twice")
        kernel = functools.partial(script.check, case, jax.random.key(3))
    assert all(1e-5 < error < 1e-2 for error in errors.values()), errors
    with pytest.raises(NotImplementedError, match=r"only mosaic_mma \(cuda\) may serve"):
        kernel("mosaic_mma")


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("decode_kernel", dict(cases=("huge",))),
        ("prefill_kernel", dict(implementation="huge")),
        ("training_kernels", dict(cases=("huge",))),
        ("training_kernels", dict(implementation="huge")),
        ("tune_decode_kernel", dict(cases=("huge",))),
        ("tune_training_kernels", dict(kernels=("huge",))),
        ("host_values", dict(way="huge")),
    ],
)
def test_names_that_there_are_none_of_are_refused(name, wrong):
    script = importlib.import_module(f"experiments.benchmarks.{name}")
    with pytest.raises(dms_jax.ConfigError, match=rf"--{next(iter(wrong))} huge: there are \w"):
        script.main(script.Config(**wrong))


def test_a_report_is_drawn_beside_no_other(tmp_path):
    script = importlib.import_module("experiments.benchmarks.decode_kernel")
    script.main(script.Config(out=tmp_path, picture=ROOT / "experiments/results/kernels"))
    assert (tmp_path / "decode.png").read_bytes().startswith(b"\x89PNG")
