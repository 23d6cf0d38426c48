"""The launch files: they call `dms-jax retrofit`, and one command takes all devices."""

import dataclasses
import pathlib
import re
import shutil
import subprocess

import jax
import pytest

from dms_jax.command_line.retrofit import PRESETS, Config

LAUNCH = pathlib.Path(__file__).resolve().parents[2] / "experiments" / "launch"


@pytest.mark.parametrize("name", ["README.md", "slurm.sh", "gke.yaml", "tpu_slice.sh"])
def test_launch_files_call_the_command_with_options_that_it_has(name):
    text = (LAUNCH / name).read_text()
    assert re.search(r"dms-jax,? retrofit", text)
    known = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Config)}
    own = {"--data", "--out", "--data-shards", "--batch-size", "--model-shards", "--coordinator"}
    used = set(re.findall(r"--[a-z-]+", text)) & (own | {"--processes", "--process"})
    assert {"--out", "--data-shards"} <= used <= known
    assert "qwen3-8b" in PRESETS


@pytest.mark.parametrize("name", ["slurm.sh", "tpu_slice.sh"])
def test_launch_scripts_are_shell(name):
    subprocess.run([shutil.which("bash") or "sh", "-n", str(LAUNCH / name)], check=True)


def test_all_devices_are_one_option():
    _, config = PRESETS["stories260k"]
    assert config.make_mesh() is None
    whole = dataclasses.replace(config, data_shards="all").make_mesh()
    assert whole is not None
    assert dict(whole.shape) == {"data": jax.device_count(), "model": 1}
    split = dataclasses.replace(config, data_shards="all", model_shards=2).make_mesh()
    assert split is not None
    assert dict(split.shape) == {"data": jax.device_count() // 2, "model": 2}
