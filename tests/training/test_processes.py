"""Two real processes of four devices each equal one: the run, its export, stops and errors."""

import gc
import io
import json
import pathlib
import re
import tracemalloc
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file

from dms_jax import processes
from dms_jax.errors import ConfigError
from dms_jax.processes import Agreement, arguments, connect, gather, parts
from dms_jax.sharding import make_mesh
from dms_jax.training import retrofit
from tests.training.killing import EXPORT, compare, finish, kill_at, losses, start
from tests.training.tiny import EAGER, documents, language_model, recipe

# One program for all tests, compiled once.
TOLD: dict[str, Any] = dict(float64=True, mesh=[4, 2], steps=20, snapshots=[1.5])


def run(count: int, out: pathlib.Path, devices: int = 8, **told: Any) -> list[dict[str, Any]]:
    """Runs to the end; returns the report of each process."""
    started = start({"out": str(out)} | told, count, devices=devices)
    finish(started)
    return [json.loads(out.with_name(f"{out.name}-{i}.json").read_text()) for i in range(count)]


def export(out: pathlib.Path) -> bytes:
    return (out / EXPORT).read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of an uninterrupted run of two processes, and their reports."""
    out = tmp_path_factory.mktemp("two") / "whole"
    return out, run(2, out, **TOLD)


@pytest.mark.nightly
def test_two_processes_are_one_run(tmp_path, whole):
    """Losses and gradients of 20 steps in float64, and the export."""
    (alone,) = run(1, tmp_path / "alone", **TOLD)
    out, both = whole
    assert [each["ended"] for each in both] == ["done", "done"]
    assert both[0] == both[1]
    for name in ("losses", "norms"):
        chex.assert_trees_all_close(np.array(both[0][name]), np.array(alone[name]), rtol=1e-9)
    # Sums over devices differ in their last bits of 64; exports are compared in 32.
    for export in (EXPORT, "snapshots/1.5/model.safetensors"):
        narrow = [
            {name: array.astype(np.float32) for name, array in load_file(model).items()}
            for model in (out / export, tmp_path / "alone" / export)
        ]
        chex.assert_trees_all_equal(*narrow)
    logged = (out / "log.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in logged] == list(range(1, 21))


@pytest.mark.nightly
def test_sigterm_to_one_process_stops_all_and_the_run_resumes(tmp_path, whole):
    out, uninterrupted = whole
    stopped = run(2, tmp_path / "run", term=[1, 1], **TOLD)
    assert [each["ended"] for each in stopped] == ["KeyboardInterrupt: stopped after step 4"] * 2
    again = run(2, tmp_path / "run", **TOLD)
    assert [each["ended"] for each in again] == ["done", "done"]
    assert stopped[0]["losses"] + again[0]["losses"] == uninterrupted[0]["losses"]
    assert export(tmp_path / "run") == export(out)


@pytest.mark.nightly
def test_a_preemption_notice_stops_all_at_one_step(tmp_path):
    """Without the run's handler SIGTERM reaches only jax's preemption service.

    This is so if the run is not in the main thread. The processes agree on a step that none has
    reached; the pause lets the other process's service learn of it.
    """
    stopped = run(2, tmp_path / "run", term=[1, 2], thread=True, pause=0.5, **TOLD)
    ends = [each["ended"] for each in stopped]
    assert ends[0] == ends[1]
    step = int(ends[0].removeprefix("KeyboardInterrupt: stopped after step "))
    assert 2 < step < TOLD["steps"]
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [str(step)]


@pytest.mark.nightly
def test_a_killed_run_ends_in_the_same_bits(tmp_path):
    """With one process; `tests/training/killing.py` kills two processes, five times."""
    same, (kill,) = compare(tmp_path, processes=1, kills=1, steps=6, seed=0)
    assert same
    assert kill["process"] == 0 <= kill["step"] <= kill["reached"]


@pytest.mark.nightly
@pytest.mark.parametrize(("count", "mesh"), [(1, [2, 2]), (2, [2, 1])])
def test_one_of_two_is_killed_and_fewer_devices_go_on(count, mesh, tmp_path, whole):
    """Eight devices, then four of one process, or one of each of two."""
    out, _ = whole
    steps = dict(TOLD, every=2)
    started = start({"out": str(tmp_path / "run")} | steps, 2)
    seen = kill_at(started, 7, 0.0, victim=1)
    reached = [
        int(path.name) for path in (tmp_path / "run/checkpoints").iterdir() if path.name.isdigit()
    ]
    assert 0 < max(reached) <= int(seen.split()[1]) < TOLD["steps"]
    size = mesh[0] * mesh[1]
    ends = run(count, tmp_path / "run", size, **steps | dict(mesh=mesh))
    assert [each["ended"] for each in ends] == ["done"] * count
    assert len(ends[0]["losses"]) == TOLD["steps"] - max(reached)
    found, expected = losses(tmp_path / "run"), losses(out)
    assert [step for step, _ in found] == [step for step, _ in expected]
    chex.assert_trees_all_close(
        np.array([loss for _, loss in found]), np.array([loss for _, loss in expected]), rtol=1e-9
    )


@pytest.mark.nightly
def test_error_in_one_process_ends_all(tmp_path):
    one, other = run(2, tmp_path / "run", fail=[1, 1], **TOLD)
    assert other["ended"] == "ValueError: a callback that fails"
    assert one["ended"].startswith("OtherProcessError: Process 1 of this run failed: ValueError")


@pytest.mark.nightly
def test_failed_export_can_be_repeated(tmp_path, whole):
    """The first process has no room for the files; then it writes several."""
    out, cut = tmp_path / "run", TOLD | {"size": 10_000}
    one, other = run(2, out, full=0, **cut)
    assert re.match("CheckpointError: .*snapshots/1.5: .*No space left", one["ended"])
    told = "OtherProcessError: Process 0 of this run failed: CheckpointError: .*No space left"
    assert re.match(told, other["ended"])
    assert not list((out / "snapshots").iterdir())
    assert [each["ended"] for each in run(2, out, **cut)] == ["done", "done"]
    assert [path.name for path in (out / "snapshots").iterdir()] == ["1.5"]
    files = sorted((out / "snapshots" / "1.5").glob("*.safetensors"))
    assert len(files) > 2
    found = {name: array for file in files for name, array in load_file(file).items()}
    chex.assert_trees_all_equal(found, load_file(whole[0] / "snapshots/1.5/model.safetensors"))


def test_an_error_is_reported_once(monkeypatch):
    told = []
    monkeypatch.setattr(processes, "several", lambda: True)
    monkeypatch.setattr(Agreement, "_exchange", lambda self, text, seconds=0: told.append(text))
    error = ValueError("full")
    Agreement().first_done(error)
    Agreement().fail(error)
    assert told == ["!ValueError: full"]
    Agreement().fail(ValueError("full"))
    assert len(told) == 2


SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        # An allocation of four tasks, with this process started without srun.
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "4"}, {"num_processes": 4}),
        (
            SLURM
            | {
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_GPUS_ON_NODE": "8",
                "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
            },
            {"num_processes": 4, "local_device_ids": [0, 1, 2, 3, 4, 5, 6, 7]},
        ),
        ({"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, {"cluster_detection_method": "ompi"}),
        ({"TPU_WORKER_HOSTNAMES": "a,b", "TPU_WORKER_ID": "1"}, {}),
        ({"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"}, {}),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "first:99",
                "JAX_NUM_PROCESSES": "8",
                "JOB_COMPLETION_INDEX": "5",
            },
            {"coordinator_address": "first:99", "num_processes": 8, "process_id": 5},
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "first:99", "NNODES": "2", "NODE_RANK": "0"},
            {"coordinator_address": "first:99", "num_processes": 2, "process_id": 0},
        ),
        (
            {
                "JAX_COORDINATOR_ADDRESS": "first:99",
                "JAX_NUM_PROCESSES": "1",
                "JAX_PROCESS_ID": "0",
            },
            None,
        ),
    ],
)
def test_processes_are_found_in_the_environment(environment, expected):
    assert arguments({"TPU_SKIP_MDS_QUERY": "1"} | environment) == expected


@pytest.mark.parametrize(("hosts", "expected"), [(b"a,b,c,d", {}), (b"a", None)])
def test_tpu_machine_reads_its_metadata(monkeypatch, tmp_path, hosts, expected):
    assert arguments({}) is None  # without a TPU nothing is queried
    monkeypatch.setattr(processes, "_TPU_DEVICES", (tmp_path,))
    monkeypatch.setattr(processes.urllib.request, "urlopen", lambda *_, **__: io.BytesIO(hosts))
    assert arguments({}) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "first:99"}, "JAX_NUM_PROCESSES and JAX_PROCESS_ID must give"),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two"},
            "JAX_NUM_PROCESSES must be a whole number, got 'two'",
        ),
    ],
)
def test_an_incomplete_environment_is_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        arguments(environment)


def test_incomplete_arguments_are_refused():
    with pytest.raises(ConfigError, match="num_processes, process_id is missing"):
        connect("first:99")


def test_a_mesh_without_a_process_is_refused(monkeypatch):
    """It used to fail later, without rows to draw, while the other processes waited."""
    meshes = [None, make_mesh(4, 2)]
    for mesh in meshes:
        processes.check_mesh(mesh)
    monkeypatch.setattr(processes.jax, "process_count", lambda: 3)
    for mesh, left in zip(meshes, ("0, 1, 2", "1, 2"), strict=True):
        with pytest.raises(ConfigError, match=rf"3 processes .* of process {left}\. Give mesh="):
            processes.check_mesh(mesh)
        with pytest.raises(ConfigError, match=rf"this one has none of process {left}\."):
            retrofit(language_model(), EAGER, recipe=recipe(), data=documents(), mesh=mesh)


def test_single_process_needs_no_agreement():
    """It agrees with itself; texts and arrays are returned unchanged."""
    assert not connect()
    agree = Agreement()
    assert agree(True, False) == (True, False)
    agree.fail(ValueError())
    agree.first_done(None)
    assert gather("text") == ["text"]
    array = jnp.arange(6).reshape(2, 3)
    asked = [(array, 1), (array, None)]
    chex.assert_trees_all_equal(list(parts(asked)), [np.array([3, 4, 5]), np.asarray(array)])


def test_reading_an_array_leaves_no_copy_on_the_host():
    """jax.device_get caches its result for as long as the array lives."""
    array = jax.device_put(
        np.arange(2.0**17).reshape(8, -1), NamedSharding(make_mesh(8), PartitionSpec("data"))
    )
    tracemalloc.start()
    try:
        chex.assert_trees_all_equal(processes.to_host(array), np.arange(2.0**17).reshape(8, -1))
        gc.collect()
        left = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert left < array.nbytes / 2
