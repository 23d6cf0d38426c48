"""Several processes save a model together: the same bytes, equal shares, one error for all."""

import json
import pathlib
import re

import jax.numpy as jnp
import pytest

from dms_jax.checkpoint import load, names, save, shard_plan
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
    for name in ("whole", "in steps"):
        save(model, model.policy, alone / name, max_shard_bytes=SIZE)
    save(model, model.policy, alone / "one file")
    save(tuned, tuned.policy, alone / "merged", max_shard_bytes=SIZE)
    save(tuned, tuned.policy, alone / "adapter", adapter_only=True)
    return out, reports, alone


WAYS = ["whole", "one file", "in steps", "merged", "adapter"]


@pytest.mark.nightly
@pytest.mark.parametrize("way", WAYS)
def test_files_equal_those_of_one_process(saved, way):
    out, reports, alone = saved
    assert [report[way]["ended"] for report in reports] == ["done", "done"]
    assert contents(out / way) == contents(alone / way)


@pytest.mark.nightly
@pytest.mark.parametrize("way", ["whole", "in steps", "merged"])
def test_each_process_writes_its_share(saved, way):
    out, reports, _ = saved
    written = [report[way]["files"] for report in reports]
    files = {file.name: file.stat().st_size for file in (out / way).glob("*.safetensors")}
    assert len(files) > 6
    assert sorted(written[0] + written[1]) == sorted(files)
    shares = [sum(files[name] for name in each) for each in written]
    assert max(shares) <= sum(files.values()) / 2 + max(files.values())


@pytest.mark.nightly
def test_each_process_holds_its_share_and_no_more(saved):
    """NumPy arrays counted by tracemalloc; file headers come on top."""
    out, reports, _ = saved
    for report in (each["in steps"] for each in reports):
        share = sum((out / "in steps" / name).stat().st_size for name in report["files"])
        assert 0.95 * share < report["held"] < 1.01 * share


@pytest.mark.nightly
def test_first_process_writes_small_checkpoints(saved):
    """The second process gets a directory that does not exist, because it need not see it."""
    _, reports, _ = saved
    written = [(report["one file"]["files"], report["adapter"]["files"]) for report in reports]
    assert written == [(["model.safetensors"], ["dms_adapter.safetensors"]), ([], [])]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "failed", "message"),
    [
        ("full", [1], "the checkpoint cannot be written to .*whole: .*No space left"),
        ("not replaced", [0], "taken is a file; give a directory"),
        (
            "unseen",
            [1],
            r"process 1 does not see .*Give a directory on .*all processes share, in place of \S+$",
        ),
        ("no base", [0], "config.json does not exist"),
    ],
)
def test_error_in_one_process_ends_all(saved, case, failed, message):
    _, reports, _ = saved
    for index, report in enumerate(reports):
        told = "" if index in failed else f"OtherProcessError: Process {failed[0]} .* failed: "
        assert re.match(f"{told}CheckpointError: .*{message}", report[case]["ended"])


@pytest.mark.nightly
def test_error_leaves_only_the_old_checkpoint(saved):
    out, _, alone = saved
    assert sorted(entry.name for entry in out.iterdir()) == sorted([*WAYS, "taken"])
    for way in ("whole", "adapter"):  # the target of the failed saves
        assert contents(out / way) == contents(alone / way)


def test_files_are_assigned_by_size(monkeypatch):
    """Files of 3, 5, 2 and 4 bytes over two processes: 5 and 2, 4 and 3."""
    sizes = {"a": [1, 2], "b": [5], "c": [2], "d": [4]}
    piece = names.Piece(names.Layout("{i}", ((0,),)))
    tensors = [
        shard_plan.Tensor((("layers",), layer), piece, size)
        for layer, size in enumerate(size for file in sizes.values() for size in file)
    ]
    monkeypatch.setattr(shard_plan.jax, "process_count", lambda: 2)
    files = shard_plan.plan_shards(tensors, max_file_bytes=4)
    assert [file.nbytes for file in files] == [3, 5, 2, 4]
    assert [file.process for file in files] == [1, 0, 0, 1]
    assert [file.name for file in files][1] == "model-00002-of-00004.safetensors"
    monkeypatch.setattr(shard_plan.jax, "process_count", lambda: 9)  # three a host
    two = shard_plan.plan_shards(tensors[:2], max_file_bytes=1)
    assert [file.process for file in two] == [4, 0]
    (one,) = shard_plan.plan_shards(tensors, max_file_bytes=99)
    assert (one.process, one.name, len(one.tensors)) == (0, "model.safetensors", 5)
