"""Several processes save a model: the same bytes as of one, one error for all."""

import json
import pathlib
import re

import jax.numpy as jnp
import pytest

from dms_jax.checkpoint import load, save
from dms_jax.config import ModelConfig, Rope
from dms_jax.model.language_model import LanguageModel
from tests.checkpoint.test_adapter import POLICY
from tests.checkpoint.test_low_rank import updated
from tests.support.models import random_model
from tests.training.killing import finish, start

CONFIG = ModelConfig(
    vocab_size=512,
    hidden_size=128,
    intermediate_size=256,
    num_layers=3,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    max_position_embeddings=512,
    rope=Rope(theta=100.0),
    qk_norm=True,
    tie_embeddings=False,
    model_type="qwen3",
)
SIZE = 150_000  # bytes of a file; the two vocabulary matrices are no larger


def contents(directory: pathlib.Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder that two processes saved, their reports, and the folder of one process."""
    folder = tmp_path_factory.mktemp("saved")
    base, out, alone = folder / "base", folder / "out", folder / "alone"
    found = LanguageModel(transformer=random_model(CONFIG, dtype=jnp.bfloat16))
    save(found, found.policy, base)
    save(updated(load(base)), POLICY, folder / "adapter", adapter_only=True)
    told = {name: str(folder / name) for name in ("base", "adapter", "out")}
    out.mkdir()
    finish(start(told | dict(size=SIZE), 2, module="tests.checkpoint.distributed_save_worker"))
    reports = [json.loads((folder / f"out-{index}.json").read_text()) for index in range(2)]
    model, tuned = load(base), load(base, adapter=folder / "adapter")
    save(model, model.policy, alone / "whole", max_shard_bytes=SIZE)
    save(model, model.policy, alone / "one file")
    save(tuned, tuned.policy, alone / "merged", max_shard_bytes=SIZE)
    save(tuned, tuned.policy, alone / "adapter", adapter_only=True)
    return out, reports, alone


WAYS = ["whole", "one file", "merged", "adapter"]


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_files_equal_those_of_one_process(saved, way):
    out, reports, alone = saved
    assert [report[way]["ended"] for report in reports] == ["done", "done"]
    assert contents(out / way) == contents(alone / way)


@pytest.mark.nightly
def test_first_process_writes(saved):
    _, reports, _ = saved
    assert len(reports[0]["whole"]["files"]) > 6
    assert [reports[1][way]["files"] for way in WAYS] == [[]] * len(WAYS)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("full", "the checkpoint cannot be written to .*whole: .*No space left"),
        ("not replaced", "taken is a file; give a directory"),
        ("no base", "config.json does not exist"),
    ],
)
def test_error_in_the_first_process_ends_all(saved, case, message):
    _, reports, _ = saved
    for told, report in zip(("", "OtherProcessError: Process 0 .* failed: "), reports, strict=True):
        assert re.match(f"{told}CheckpointError: .*{message}", report[case]["ended"])


@pytest.mark.nightly
def test_error_leaves_only_the_old_checkpoint(saved):
    out, _, alone = saved
    assert sorted(entry.name for entry in out.iterdir()) == sorted([*WAYS, "taken"])
    for way in ("whole", "adapter"):  # the target of the failed saves
        assert contents(out / way) == contents(alone / way)
