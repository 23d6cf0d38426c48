"""Training over any mesh of 8 devices equals training on one: losses, gradients, noise, places."""

import dataclasses
import functools
import os
import subprocess
import sys
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from dms_jax.checkpoint import load, save
from dms_jax.devices import DEVICES
from dms_jax.model.language_model import LanguageModel
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import Vanilla
from dms_jax.sharding import make_mesh
from dms_jax.training import retrofit
from dms_jax.training import trainer as library
from dms_jax.training.parameters import parameters
from dms_jax.training.recipe import Stage
from dms_jax.training.trainer import Trainer
from tests.support.models import random_model, random_tokens, tiny_config
from tests.training.tiny import EAGER, LENGTH, documents, recipe

ROOT = Path(__file__).resolve().parents[2]
CONFIG = dataclasses.replace(tiny_config(num_heads=8, num_kv_heads=4), vocab_size=32)
STAGE = Stage("ramp", 3, 1e-3, 4.0, adapter_learning_rate=1e-2)
SEQUENCES, STEPS = 16, 2


def batches():
    """All sequences of a step, with padding, answers and two documents in some."""
    tokens = random_tokens(4, SEQUENCES, LENGTH)
    ids = np.ones_like(tokens)
    ids[::3, 5:], ids[1::3, 9:] = 2, 0
    mask = np.ones_like(tokens, bool)
    mask[::2, :4] = False
    return {"tokens": tokens, "loss_mask": mask, "segment_ids": ids}


def trained(mesh, passes, trainable):
    """Returns the metrics of a few steps and Adam's first moment, which is linear in gradients."""
    with jax.enable_x64(True), jax.set_mesh(mesh):
        model = LanguageModel(random_model(CONFIG, adapter=True))
        options = recipe(
            STAGE,
            batch_size=SEQUENCES,
            remat="all_but_attention",
            trainable=trainable,
            low_rank=LowRank(rank=2),
        )
        trainer = Trainer(model, EAGER, options, seed=0, mesh=mesh)
        whole, records = batches(), []
        size = SEQUENCES // passes
        split = [
            {key: x[at : at + size] for key, x in whole.items()} for at in range(0, SEQUENCES, size)
        ]
        for step in range(STEPS):
            records.append(jax.device_get(trainer.step(split, options.progress(step, EAGER))))
        (adam,) = [s for s in trainer.state.optimizer if hasattr(s, "mu")]
        return records, jax.device_get((adam.mu, trainer.state.parameters))


@functools.cache
def alone(trainable):
    return trained(make_mesh(1, 1), 1, trainable)


@pytest.mark.parametrize(
    ("data", "model", "passes", "trainable", "together"),
    [
        (8, 1, 2, "all", True),
        (4, 2, 1, "all", False),
        (2, 4, 4, "all", False),
        (1, 8, 1, "all", False),  # twice as many devices as KV heads
        (8, 1, 1, "low_rank", False),
    ],
)
def test_a_layout_changes_nothing(data, model, passes, trainable, together, monkeypatch):
    """Neither do passes, nor whether a step gathers the layers once or in every pass."""
    if together:
        monkeypatch.setattr(library, "data_sheet", lambda kind: DEVICES["h200"])
    records, arrays = trained(make_mesh(data, model), passes, trainable)
    expected, others = alone(trainable)
    assert 0.01 < expected[-1]["evicted"] < 0.9
    chex.assert_trees_all_close(records, expected, rtol=1e-9, atol=1e-14)
    chex.assert_trees_all_close(arrays, others, rtol=1e-8, atol=1e-11)


def test_no_device_holds_the_model_while_training(tmp_path):
    """Neither the caller, nor the trainer, nor an evaluation, nor a snapshot keeps a replica."""
    mesh = make_mesh(8, 1)
    save(LanguageModel(random_model(CONFIG, dtype=np.float32)), Vanilla(), tmp_path)
    matrices = {
        x.shape
        for name, x in parameters(random_model(CONFIG)).items()
        if name == "embedding" or name.endswith("kernel")
    }
    before = {id(x) for x in jax.live_arrays()}
    sizes = []

    def look(*_):
        for x in jax.live_arrays():
            if id(x) not in before and x.shape in matrices:
                sizes.append(x.size)
                assert x.addressable_shards[0].data.size * 8 == x.size, (x.shape, x.sharding)
        return {}

    options = recipe(STAGE, batch_size=8, snapshots=(2.0,), compute_dtype="bfloat16")
    result = retrofit(
        load(tmp_path, mesh=mesh, for_training=True),
        EAGER,
        recipe=options,
        data=documents(),
        progress=False,
        on_step=look,
        on_snapshot=look,
        evaluate=look,
        evaluate_every=1,
    )
    # The parameters, their two moments and the teacher, at the least.
    assert len(sizes) > 4 * 5
    embedding = result.transformer.embedding.get_value()
    assert embedding.addressable_shards[0].data.size == embedding.size  # placed for decoding


COUNTED = """
import contextlib
import numpy as np
from dms_jax.policies import DMC
from dms_jax.sharding import make_mesh
from dms_jax.training.recipe import Stage
from dms_jax.training.trainer import Trainer
from tests.training.tiny import LENGTH, language_model, recipe
import jax

policy, mesh = DMC(offset=0.3, window=4), make_mesh(2, 1)
options = recipe(Stage("neuron_decay", 2, 1e-3), Stage("ramp", 2, 1e-3, 4.0))
with jax.set_mesh(mesh):
    trainer = Trainer(language_model(), policy, options, 0, mesh)
    tokens = np.zeros((4, LENGTH), np.int32)
    batch = {"tokens": tokens, "loss_mask": np.ones_like(tokens, bool)}
    for step in range(4):
        if step == 2:
            trainer.zero_borrowed_neurons()
        trainer.step([batch], options.progress(step, policy))
        print(trainer._step._cache_size())
"""


@pytest.mark.slow
def test_a_stage_is_compiled_once():
    """In a process of its own, where no kernel has been imported before."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    }
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["1", "1", "2", "2"]
