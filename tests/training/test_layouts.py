"""Training over any mesh of 8 devices equals training on one.

Compares losses, gradients, noise, data order and export of 20 steps, and placements.
"""

import dataclasses
import functools
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import chex
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from dms_jax.checkpoint import load, save
from dms_jax.data.batches import RowAssignment, process_batches
from dms_jax.devices import DEVICES
from dms_jax.model.language_model import LanguageModel
from dms_jax.model.low_rank import LowRank
from dms_jax.policies import Vanilla
from dms_jax.sharding import make_mesh
from dms_jax.training import retrofit
from dms_jax.training import trainer as library
from dms_jax.training.parameters import parameters
from dms_jax.training.recipe import Stage
from dms_jax.training.trainer import Trainer, rows_here
from tests.support.models import random_model, tiny_config
from tests.training.tiny import EAGER, documents, recipe

ROOT = Path(__file__).resolve().parents[2]
CONFIG = dataclasses.replace(tiny_config(num_heads=8, num_kv_heads=4), vocab_size=32)
STAGE = Stage("ramp", 20, 1e-3, 4.0, adapter_learning_rate=1e-2)
SEQUENCES, STEPS, LENGTH = 16, 20, 16


def trained(mesh, passes, trainable):
    """Returns batches, metrics, Adam's first moment (a sum of gradients), and the export.

    Documents are packed with padding, several per sequence, and some tokens are outside the loss.
    """
    with jax.enable_x64(True), jax.set_mesh(mesh):
        model = LanguageModel(random_model(CONFIG, adapter=True))
        options = recipe(
            STAGE,
            batch_size=SEQUENCES,
            sequence_length=LENGTH,
            remat="all_but_attention",
            trainable=trainable,
            low_rank=LowRank(rank=2),
        )
        trainer = Trainer(model, EAGER, options, seed=0, mesh=mesh)
        size = SEQUENCES // passes
        source = process_batches(
            [[token % CONFIG.vocab_size for token in document] for document in documents()],
            None,
            assignment=RowAssignment(options.batch_sizes, size, rows_here(mesh, size)),
            length=LENGTH,
            packing="first_fit",
            vocab_size=CONFIG.vocab_size,
            seed=0,
        )
        seen, records = [], []
        for step in range(STEPS):
            drawn = [next(source) for _ in range(passes)]
            for batch in drawn:
                batch["loss_mask"][::2, :4] = False
            seen.append(np.concatenate([batch["tokens"] for batch in drawn]))
            records.append(jax.device_get(trainer.step(drawn, options.progress(step, EAGER))))
        (adam,) = [s for s in trainer.state.optimizer if hasattr(s, "mu")]
        with tempfile.TemporaryDirectory() as folder:
            save(trainer.model(), EAGER, folder)
            exported = load_file(Path(folder) / "model.safetensors")
        return seen, records, jax.device_get(adam.mu), exported


@functools.cache
def alone(trainable):
    return trained(make_mesh(1, 1), 1, trainable)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("data", "sequence", "model", "passes", "trainable", "together"),
    [
        (8, 1, 1, 2, "all", True),
        (2, 1, 4, 4, "all", False),
        (1, 1, 8, 1, "all", False),  # twice as many devices as KV heads
        (8, 1, 1, 1, "low_rank", False),
        (4, 1, 2, 2, "low_rank", True),
        (1, 8, 1, 1, "all", False),
        (2, 4, 1, 2, "all", True),
        (2, 2, 2, 1, "all", False),
    ],
)
def test_mesh_layouts_equal_one_device(
    data, sequence, model, passes, trainable, together, monkeypatch
):
    """Also for other numbers of passes, and with much memory.

    Then layers are gathered once a step instead of in every pass, and constants never.
    """
    if together:
        monkeypatch.setattr(library, "data_sheet", lambda kind: DEVICES["h200"])
    mesh = make_mesh(data, model, sequence=sequence)
    seen, records, moments, exported = trained(mesh, passes, trainable)
    same, expected, others, export = alone(trainable)
    assert 0.01 < expected[-1]["evicted"] < 0.9
    chex.assert_trees_all_equal(seen, same)
    chex.assert_trees_all_close(records, expected, rtol=1e-9, atol=1e-14)
    for name, moment in others.items():
        largest = np.abs(moment).max()
        chex.assert_trees_all_close(moments[name], moment, rtol=0, atol=1e-9 * largest)
    # Sums over devices differ in their last bits of 64; the exports are compared in 32.
    narrow = [{n: x.astype(np.float32) for n, x in each.items()} for each in (exported, export)]
    chex.assert_trees_all_equal(*narrow)


@pytest.mark.nightly
def test_no_device_holds_the_whole_model_in_training(tmp_path):
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
    # At least the parameters, their two moments and the teacher.
    assert len(sizes) > 4 * 5
    embedding = result.transformer.embedding.get_value()
    assert embedding.addressable_shards[0].data.size == embedding.size  # placed for decoding


COUNTED = """
import contextlib
import numpy as np
from dms_jax.policies import DMC
from dms_jax.sharding import make_mesh
from dms_jax.training.recipe import Stage
from dms_jax.training.trainer import Trainer, rows_here
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


@pytest.mark.nightly
def test_a_stage_is_compiled_once():
    """In a separate process, which has not imported any kernel."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
        "JAX_NUM_CPU_DEVICES": "2",
    }
    done = subprocess.run(
        [sys.executable, "-c", COUNTED], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.split() == ["1", "1", "2", "2"]
