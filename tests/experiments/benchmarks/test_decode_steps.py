"""Steps on one device and on two: what takes turns, what is counted, and what cannot be split."""

import collections
import dataclasses
import json
from typing import Any

import chex
import jax

# When it is first imported jax has one setting more, and traces again what it traced before.
import jax.experimental.pallas.tpu
import jax.numpy as jnp
import numpy as np
import pytest

import dms_jax
from dms_jax.generation.runner import Runner
from experiments.benchmarks import decode_steps, shapes, step_options

TINY: dict[str, Any] = dict(
    shapes=("tiny",), batch=2, context=192, window=16, chunk=4, repeats=1, dtype="float32"
)
# Of the tiny shape: two layers of 4 query heads and 2 KV heads of 16, 64 wide, 128 in the middle.
WEIGHTS = 2 * (64 * (4 + 2 * 2) * 16 + 4 * 16 * 64 + 3 * 64 * 128) + 64 * 512
NORMS = 5 * 64


@pytest.mark.nightly
def test_one_and_two_devices_take_turns_and_draw_the_same(monkeypatch, tmp_path):
    lowered, drawn = collections.Counter(), {1: [], 2: []}
    read, filled = Runner.read, decode_steps.filled_runner

    def count(event: str, duration_secs: float, **facts) -> None:
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration":
            lowered[facts["fun_name"]] += 1

    def keep(self, launched):
        steps = read(self, launched)
        drawn[decode_steps.model_parallel(self.model)].append(np.asarray(steps.tokens))
        return steps

    def empty_pages(*args):
        """Pages have other numbers on two devices, and so a row other random contents."""
        runner = filled(*args)
        pool = jax.tree.map(jnp.zeros_like, runner.cache.pool)
        runner.cache = dataclasses.replace(runner.cache, pool=pool)
        return runner

    monkeypatch.setattr(Runner, "read", keep)
    monkeypatch.setattr(decode_steps, "filled_runner", empty_pages)
    monkeypatch.setattr(decode_steps, "read_rate", lambda: 1e9)
    out = tmp_path / "steps.json"
    config = decode_steps.Config(**TINY, ratios=(1, 4), model_parallel=(1, 2), turns=2, out=out)
    jax.clear_caches()  # another test may have lowered one of the programs
    jax.monitoring.register_event_duration_secs_listener(count)
    decode_steps.main(config)
    jax.monitoring.unregister_event_duration_listener(count)
    rows = json.loads(out.read_text())["rows"]
    assert [(row["ratio"], row["model_parallel"]) for row in rows] == [
        (1, 1),
        (1, 2),
        (4, 1),
        (4, 2),
    ]
    assert [row["name"] for row in rows[::3]] == ["plain cache", "live = context / 4, 2 devices"]
    assert all(len(row["turns_ms"]) == 2 and row["step_ms"] in row["turns_ms"] for row in rows)
    # Each number of devices has a program for each ratio, which serves every turn.
    assert lowered["jit(decode)"] == 4
    assert len(drawn[1]) == len(drawn[2]) > 4
    chex.assert_trees_all_equal(drawn[1], drawn[2])
    whole, half = rows[:2]
    assert whole["weight_bytes_a_device"] == 4 * (WEIGHTS + NORMS)
    assert half["weight_bytes_a_device"] == 4 * (WEIGHTS // 2 + NORMS)
    assert half["read_cache_bytes_a_device"] == whole["read_cache_bytes_a_device"] // 2
    assert whole["cache_bytes"] == half["cache_bytes"]
    for row in rows:
        read_bytes = row["weight_bytes_a_device"] + row["read_cache_bytes_a_device"]
        assert row["roofline_ms"] == pytest.approx(read_bytes / 1e6, rel=1e-6)
        assert row["share_of_roofline"] == pytest.approx(row["roofline_ms"] / row["step_ms"])


def test_the_roofline_is_that_of_the_device_with_the_longest_heads(monkeypatch):
    model = shapes.model_of("tiny", jnp.float32, dms_jax.make_mesh(model=2))
    config = decode_steps.Config(**TINY, ratios=(4,), model_parallel=(2,))
    lengths = np.ones((2, 2, 2), int) * [64, 16]
    monkeypatch.setattr(decode_steps, "row_lengths", lambda *_: lengths)
    monkeypatch.setattr(decode_steps, "time_runner", lambda *_: (1e-3, 1000.0))
    figures = decode_steps.time_paged(config, model, 4, 1e9)
    assert figures["read_cache_bytes_a_device"] == 0.8 * 1000 * 2 * 16 * 4
    runner = decode_steps.filled_runner(config, model, dms_jax.Vanilla(), lengths, 1)
    # Rows of 64 and of 16 tokens, and as many steps as are timed: 2 and 1 pages of 64.
    assert runner.cache.k_pages.shape[0] == 2 * (2 * 2 * 2)
    assert {each.data.shape[0] for each in runner.cache.k_pages.addressable_shards} == {8}


def test_what_cannot_be_split_is_refused_before_a_model_is_made(monkeypatch, tmp_path):
    says = "qwen2.5-0.5b has 2 KV heads, which 4 devices cannot share: give --model-parallel 1 or 2"
    with pytest.raises(dms_jax.ConfigError, match=says):
        decode_steps.Config(shapes=("qwen2.5-0.5b",), model_parallel=(1, 4))
    with pytest.raises(dms_jax.ConfigError, match="--model-parallel must be positive"):
        decode_steps.Config(model_parallel=(0,))
    with pytest.raises(dms_jax.ConfigError, match="timed on one device: leave out --cudnn"):
        decode_steps.Config(cudnn=True, model_parallel=(1, 2))
    monkeypatch.setattr(jax, "devices", lambda *_: [None])
    monkeypatch.setattr(decode_steps, "read_rate", lambda: pytest.fail("something was timed"))
    with pytest.raises(dms_jax.ConfigError, match="takes 2 devices; there are 1"):
        decode_steps.main(decode_steps.Config(model_parallel=(1, 2), out=tmp_path / "out.json"))
    with pytest.raises(dms_jax.ConfigError, match="takes 2 devices; there are 1"):
        step_options.main(step_options.Config(model_parallel=2, out=tmp_path / "out.json"))
