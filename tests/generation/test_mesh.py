"""Sequences over `data`, heads over `model`: the same answers, and each device keeps its pages."""

import collections
import dataclasses

import jax
import pytest

import dms_jax
from dms_jax import assets
from dms_jax.generation import Engine
from dms_jax.generation.programs import Program
from dms_jax.model.language_model import GenerationDefaults
from tests.generation.support import GREEDY, MECHANISMS, SHAPE, engine_for, prompts
from tests.support.instances import further


@pytest.mark.parametrize(
    ("name", "sizes", "lanes", "shards"),
    [
        ("dms", (2, 2), 4, 4),
        *further(
            *(("dms", (2, 2), 3, 2), ("dms", (2, 1), 4, 2), ("vanilla", (1, 2), 4, 2)),
            *((name, (2, 2), 4, 4) for name in ("snapkv", "quest", "tova")),
        ),
    ],
)
def test_answers_do_not_depend_on_mesh(name, sizes, lanes, shards, monkeypatch):
    """Three lanes do not divide over two devices; two would, but must not be split.

    More prompts than lanes, so that later ones run in programs of a few entries.
    """
    mesh, given = dms_jax.make_mesh(*sizes), prompts([5, 30, 1, 13, 9, 17])
    model = dataclasses.replace(
        dms_jax.load(assets.path("stories260k"), mesh=mesh),
        policy=MECHANISMS[name],
        generation=GenerationDefaults(),
    )
    expected = engine_for(name).generate(given, sampling=GREEDY)
    engine = Engine(model, max_tokens=64, **(SHAPE | {"num_lanes": lanes}))
    assert engine.runner.num_shards == shards
    # The policy's numbers are on every device, so no program waits for a transfer.
    for number in jax.tree.leaves(engine.runner.traced_policy):
        assert number.sharding.is_fully_replicated
        assert number.sharding.device_set == set(mesh.devices.flat)
    ran, call = collections.Counter[tuple[str, bool]](), Program.__call__

    def counted(program, *arguments):
        ran[program.__name__, program._signature(arguments) in program._ready] += 1
        return call(program, *arguments)

    monkeypatch.setattr(Program, "__call__", counted)
    completions = engine.generate(given, sampling=GREEDY)
    # The precompiled programs run, wherever their arguments come from.
    names = {"extend", "keep_hidden", "first_tokens", "decode", "clear"}
    assert all(ran[name, True] and not ran[name, False] for name in names), ran
    assert [c.tokens for c in completions] == [c.tokens for c in expected]
    assert [c.usage.kv_reads for c in completions] == pytest.approx(
        [c.usage.kv_reads for c in expected]
    )
    assert engine.runner.reservation.allocator.pages_in_use == 0
