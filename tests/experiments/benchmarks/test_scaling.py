"""The table of 1, 2, 4 and 8 devices: its calls, its comparison, and a dry run on eight."""

import importlib
import json

import pytest
import tyro

from experiments.benchmarks import scaling, timing, traces, training
from experiments.benchmarks.scaling import Config, Job

JOBS = scaling.jobs_of((1, 2, 4, 8))


def test_goals_come_first_on_every_number_of_devices():
    assert JOBS[:4] == [Job("training", "1b", data=size) for size in (1, 2, 4, 8)]
    assert len(set(JOBS)) == len(JOBS)
    assert {job.devices for job in JOBS} == {1, 2, 4, 8}
    assert Job("training", "8b-all", data=8) in JOBS
    assert Job("training", "1b-32k", sequence=8) in JOBS
    assert Job("decoding", "8b", data=4, model=2) in JOBS
    assert {job.devices for job in scaling.jobs_of((1, 8))} == {1, 8}


@pytest.mark.parametrize("tiny", [True, False])
def test_every_call_has_valid_options(tiny):
    for job in JOBS:
        module, *options = scaling.call_of(job, Config(tiny=tiny))
        script = importlib.import_module(f"experiments.benchmarks.{module}")
        made = tyro.cli(script.Config, args=options)
        if module == "training":
            (name,) = made.cases
            case = training.case_of(name)
            assert (case.data, case.sequence, case.model) == (job.data, job.sequence, job.model)
            assert case.remat == "auto"
        elif module == "engine":
            assert (made.data_parallel, made.model_parallel) == (job.data, job.model)
            assert made.lanes % job.data == 0


def test_rows_are_compared_with_one_device_of_their_name():
    rows = [
        dict(part="training", name="1b", devices=1, tokens_per_second=100),
        dict(part="training", name="1b", devices=4, tokens_per_second=370),
        dict(part="decoding", name="1b", devices=4, tokens_per_second=370),
        dict(part="training", name="1b", devices=8, failed="no memory"),
    ]
    scaling.compare(rows)
    assert [row.get("times_one") for row in rows] == [1.0, 3.7, None, None]


def test_shares_of_collectives_are_means_over_devices():
    """Ten microseconds: an all-gather from 3 to 6, beside a product until 4; the other has none."""
    busy = [(0.0, 4.0, "nvjet"), (3.0, 3.0, "ncclDevKernel_AllGather"), (6.0, 4.0, "nvjet")]
    assert timing.shares_of_collectives([busy]) == {"share": 0.3, "alone_share": 0.2}
    free = [(5.0, 2.0, "nvjet"), (7.0, 8.0, "fusion")]
    assert timing.shares_of_collectives([busy, free]) == {"share": 0.15, "alone_share": 0.1}
    assert timing.shares_of_collectives([]) == {"share": None, "alone_share": None}
    kernels = [dict(ts=start, dur=length, name=name) for start, length, name in busy]
    assert traces.summarise(kernels)["collectives"] == {"share": 0.3, "alone_share": 0.2}


@pytest.mark.nightly
def test_dry_run_of_eight_devices(tmp_path):
    """Every part in its own process, over every axis, as on a machine of eight GPUs."""
    config = Config(devices=(8,), tiny=True, steps=1, out=tmp_path / "scaling.json")
    assert scaling.main(config) == 0
    report = json.loads(config.out.read_text())
    assert report["devices"] == 8
    assert len(report["rows"]) == len(scaling.jobs_of((8,)))
    assert all(row["tokens_per_second"] > 0 for row in report["rows"])
