"""The operations that the backward pass recomputes with remat="auto"."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from dms_jax.checkpoint import load
from dms_jax.command_line.shapes import SHAPES
from dms_jax.devices import DEVICES
from dms_jax.errors import OutOfMemoryError
from dms_jax.model import low_rank
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import DMS
from dms_jax.sharding import make_mesh
from dms_jax.training import retrofit
from dms_jax.training import trainer as library
from dms_jax.training.program import StepProgram, program_of_shape
from dms_jax.training.recipe import Recipe, Stage
from dms_jax.training.remat import Room, choose_remat, holds_constants, kept_bytes
from dms_jax.training.trainer import Trainer
from tests.support.models import tiny_config
from tests.training.tiny import ADAPTER, documents, language_model, recipe

OPEN = Recipe("open", (Stage("ramp", 10, 1e-5, 4.0),), sequence_length=4096, batch_size=4)


@pytest.mark.parametrize(
    ("shape", "length", "sequences", "trainable", "device", "expected"),
    [
        ("llama-3.2-1b", 4096, 4, "all", "h200", "all_but_products"),
        ("llama-3.2-1b", 4096, 4, "all", "l4", "all_but_attention"),
        ("llama-3.2-1b", 4096, 4, "all", None, "all_but_attention"),
        ("llama-3.1-8b", 8192, 1, "adapter", "h200", "all_but_products"),
        ("llama-3.1-8b", 32768, 1, "adapter", "h200", "all_but_attention"),
    ],
)
def test_products_are_kept_where_memory_allows(
    shape, length, sequences, trainable, device, expected
):
    """Measured on an H200: 39 and 43 of 141 GB with kept products."""
    open_one = dataclasses.replace(OPEN, sequence_length=length, batch_size=sequences)
    config, policy = SHAPES[shape], DMS(source="adapter")
    skeleton = low_rank.skeleton(
        config, adapter=policy.retrofit.adapter, low_rank=None, dtype=np.float32
    )
    size = sum(x.size for x in jax.tree.leaves(skeleton))
    room = Room(
        config,
        parameters=size,
        trained=size if trainable == "all" else 10**6,
        shards=(1, 1, 1),
        memory=None if device is None else float(DEVICES[device].memory),
    )
    assert choose_remat(open_one, room) == dataclasses.replace(open_one, remat=expected)
    told = dataclasses.replace(open_one, remat="everything")
    assert choose_remat(told, room._replace(memory=1e15)) == told


def test_tensor_parallelism_does_not_split_hidden_states():
    """Every device keeps whole inputs of layers and sums after attention."""
    heads = dict(num_layers=13, num_heads=8, num_kv_heads=4, head_dim=16)
    config = dataclasses.replace(tiny_config(), hidden_size=64, intermediate_size=224, **heads)
    one = dataclasses.replace(OPEN, sequence_length=192, compute_dtype="float32", batch_size=3)
    kept = {
        remat: kept_bytes(config, one, remat, 3, model=4) / (4 * 13 * 3 * 192)
        for remat in ("all_but_products", "all_but_attention", "everything")
    }
    # As in the compiled step: x and its sum with attention; outputs, queries, keys, values; gates.
    assert kept["all_but_products"] == 64 + 64 + (128 + 128 + 128 + 448) / 4
    assert (kept["all_but_attention"], kept["everything"]) == (64 + 128 / 4, 64)

    large = dataclasses.replace(OPEN, batch_size=32, micro_batch_size=1)
    size, memory = 70_600_000_000, DEVICES["v6e"].memory
    room = Room(SHAPES["llama-3.1-70b"], size, size, (32, 1, 8), float(memory))
    assert choose_remat(large, room).remat == "all_but_attention"


@pytest.mark.parametrize(
    ("shape", "length", "trainable", "device", "expected"),
    [
        # 24.7 GB of kept products and 16 of frozen weights, of 0.6 x 80.
        ("llama-3.1-8b", 8192, "adapter", "h100", True),
        ("llama-3.1-8b", 16384, "adapter", "h100", False),
        ("llama-3.1-8b", 8192, "adapter", None, False),
        # Beside 16 GB of state and 2 of shards, 16 of the teacher.
        ("llama-3.1-8b", 8192, "all", "h200", True),
        ("llama-3.1-70b", 8192, "adapter", "h200", False),
    ],
)
def test_constants_are_whole_where_memory_allows(shape, length, trainable, device, expected):
    config, policy = SHAPES[shape], DMS(source="adapter")
    skeleton = low_rank.skeleton(
        config, adapter=policy.retrofit.adapter, low_rank=None, dtype=np.float32
    )
    size = sum(x.size for x in jax.tree.leaves(skeleton))
    open_one = dataclasses.replace(
        OPEN, sequence_length=length, batch_size=8, micro_batch_size=1, remat="all_but_products"
    )
    room = Room(
        config,
        parameters=size,
        trained=size if trainable == "all" else 10**6,
        shards=(8, 1, 1),
        memory=None if device is None else float(DEVICES[device].memory),
    )
    assert holds_constants(open_one, room, 2 * size) == expected
    unknown = dataclasses.replace(open_one, remat="nothing")
    assert not holds_constants(unknown, room, 2 * size)
    if expected:  # devices along `model` share them
        assert not holds_constants(open_one, room, 40 * size)
        assert holds_constants(open_one, room._replace(shards=(8, 1, 32)), 40 * size)


def test_trainer_and_plan_choose_alike(monkeypatch):
    mesh = make_mesh(2, 1)
    open_one = recipe(batch_size=2, remat="auto")
    chosen = []
    for device in ("h200", None):
        sheet = device and DEVICES[device]
        monkeypatch.setattr(library, "data_sheet", lambda kind, sheet=sheet: sheet)
        with jax.set_mesh(mesh):
            trainer = Trainer(language_model(), ADAPTER, open_one, 0, mesh)
        memory = None if sheet is None else float(sheet.memory)
        program = program_of_shape(
            language_model().config, ADAPTER, open_one, mesh, "float32", memory=memory
        )
        assert trainer.recipe == program.recipe
        chosen.append(program.recipe.remat)
    assert chosen == ["all_but_products", "all_but_attention"]


def test_out_of_memory_error_suggests_remat(monkeypatch):
    def step(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9")

    monkeypatch.setattr(StepProgram, "jit", lambda _: step)
    said = r"`micro_batch_size=1`; .*sequence=2\), --sequence-shards 2.*dms-jax plan"
    with pytest.raises(OutOfMemoryError, match=said):
        retrofit(language_model(), ADAPTER, recipe=recipe(), data=documents(), progress=False)


@pytest.mark.nightly
def test_result_too_large_for_decoding_stays_split(tmp_path, monkeypatch):
    """Decoding holds a whole model on each shard of `data`; the moments are freed before."""
    model, held = language_model(), []
    shape = model.transformer.embedding.get_value().shape
    earlier = jax.live_arrays()  # other tests' arrays, kept so that no id is reused
    known = {id(x) for x in earlier}

    def place(_):
        held.extend(
            x
            for x in jax.live_arrays()
            if id(x) not in known and x.shape == shape and len(x.devices()) == 2
        )
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9")

    monkeypatch.setattr(LanguageModel, "place", place)
    options: dict[str, Any] = dict(mesh=make_mesh(2, 1), data=documents(), progress=False)
    with pytest.warns(UserWarning, match="split over the devices as for training"):
        result = retrofit(
            model, ADAPTER, recipe=recipe(Stage("ramp", 2, 1e-3, 4.0)), out=tmp_path, **options
        )
    embedding = result.transformer.embedding.get_value()
    assert embedding.addressable_shards[0].data.size * 2 == embedding.size
    assert len(held) == 1
    assert load(tmp_path / "model").policy == ADAPTER
