"""Collectives of programs, counted by hand and from a compiled one."""
# ruff: noqa: E501

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dms_jax.sharding import make_mesh
from dms_jax.training.planning.collectives import Collective, collectives

# What the TPU's compiler writes: a loop of two passes around one of 16 layers, an all-reduce within
# a fusion that scatters, and groups written in three ways.
PROGRAM = """\
HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.clone.1 (input.12: f32[1000,8]) -> f32[1000,2] {
  %input.12 = f32[1000,8]{1,0:T(8,128)} parameter(0)
  %all-reduce.86 = f32[1000,8]{1,0:T(8,128)} all-reduce(%input.12), channel_id=26, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %slice.1 = f32[1000,2]{1,0} dynamic-slice(%all-reduce.86), dynamic_slice_sizes={1000,2}
}

%layers.body (p: (s32[], bf16[64,16])) -> (s32[], bf16[64,16]) {
  %all-gather.1 = bf16[64,16]{1,0:T(8,128)(2,1)} all-gather(%slice), channel_id=1, replica_groups=mesh['data'=4,'model'=2] {'data'}, dimensions={1}, metadata={op_name="jit(step)/while"}
  ROOT %tuple.1 = (s32[], bf16[64,16]) tuple(%i, %all-gather.1)
}

%layers.condition (p: (s32[], bf16[64,16])) -> pred[] {
  %constant.3 = s32[]{:T(128)} constant(16)
  ROOT %lt.1 = pred[]{:T(512)} compare(%i, %constant.3), direction=LT
}

%passes.body (p: (s32[], bf16[64,16])) -> (s32[], bf16[64,16]) {
  %while.2 = (s32[]{:T(128)}, bf16[64,16]{1,0}) while(%p), condition=%layers.condition, body=%layers.body
  ROOT %fusion.5 = f32[1000,2]{1,0} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.clone.1
}

%passes.condition (p: (s32[], bf16[64,16])) -> pred[] {
  %constant.4 = s32[] constant(2)
  ROOT %lt.2 = pred[] compare(%i, %constant.4), direction=LT
}

ENTRY %main.9 (a: f32[8]) -> f32[8] {
  %while.7 = (s32[], bf16[64,16]{1,0}) while(%t), condition=%passes.condition, body=%passes.body, metadata={op_name="all-gather(no)"}
  %all-reduce.2 = f32[] all-reduce(%y), channel_id=3, replica_groups=[1,8]<=[8], to_apply=%add
  %collective-permute-start.1 = (bf16[4,4]{1,0}, bf16[4,4]{1,0}, u32[], u32[]) collective-permute-start(%z), channel_id=4, source_target_pairs={{0,1},{1,0}}
  %collective-permute-done.1 = bf16[4,4]{1,0} collective-permute-done(%collective-permute-start.1)
  ROOT %copy.1 = f32[8]{0} copy(%a)
}
"""


def test_loops_count_as_often_as_they_run():
    assert collectives(PROGRAM, 8) == [
        Collective("all-gather", "bf16[64,16]", 4, 32, 64 * 16 * 2 * 3 / 4),
        Collective("reduce-scatter", "f32[1000,8]", 4, 2, 1000 * 8 * 4 * 3 / 4),
        Collective("collective-permute", "bf16[4,4]", 8, 1, 32.0),
        Collective("all-reduce", "f32[]", 8, 1, 4 * 2 * 7 / 8),
    ]
    assert collectives("", 8) == []


# What the GPU's compiler writes: several arrays are sent together.
COMBINED = """\
ENTRY %main.9 (a: f32[8]) -> f32[8] {
  %all-gather-start.1 = ((bf16[64,8]{1,0}, bf16[4,2]{1,0}), (bf16[64,16]{1,0}, bf16[4,4]{1,0})) all-gather-start(%a, %b), channel_id=1, replica_groups={{0,1}}, dimensions={1}
  %all-gather-start.2 = (bf16[64,4]{1,0}, bf16[64,8]{1,0}) all-gather-start(%c), channel_id=2, replica_groups=[1,2]<=[2], dimensions={1}
  %reduce-scatter.1 = (f32[8,4]{1,0}, f32[2]{0}) reduce-scatter(%d, %e), channel_id=3, replica_groups={{0,1}}, to_apply=%add
  %all-reduce-start.1 = (f32[16]{0}, f32[8]{0}) all-reduce-start(%f, %g), channel_id=4, replica_groups={{0,1}}, to_apply=%add
}
"""


def test_arrays_that_are_sent_together_all_count():
    assert collectives(COMBINED, 2) == [
        Collective("all-gather", "bf16[64,16]", 2, 1, (64 * 16 + 16) * 2 / 2),
        Collective("all-gather", "bf16[64,8]", 2, 1, 64 * 8 * 2 / 2),
        Collective("reduce-scatter", "f32[8,4]", 2, 1, 2 * (8 * 4 + 2) * 4 / 2),
        Collective("all-reduce", "f32[16]", 2, 1, 2 * (16 + 8) * 4 / 2),
    ]


def test_a_compiled_program():
    """Three layers, each gathered from 8 shards once and needed by all of them."""
    mesh = make_mesh(8, 1)
    split = NamedSharding(mesh, PartitionSpec(None, None, "data"))
    rows = NamedSharding(mesh, PartitionSpec("data"))

    def step(weights, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0].sum()

    weights = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32, sharding=split)
    x = jax.ShapeDtypeStruct((16, 64), jnp.float32, sharding=rows)
    found = collectives(jax.jit(step).lower(weights, x).compile().as_text(), 8)
    gathered, summed = (one for one in found if one.kind in ("all-gather", "all-reduce"))
    assert (gathered.kind, gathered.group, gathered.count) == ("all-gather", 8, 3)
    assert gathered.bytes_sent == 64 * 64 * 4 * 7 / 8
    assert (summed.kind, summed.shape, summed.count) == ("all-reduce", "f32[]", 1)


# A gather beside other work, in three parts, within a loop of five turns; and again outside of it.
CHAINED = """\
HloModule jit_step

%begins (a: bf16[8,4]) -> bf16[8,16] {
  %all-gather.1 = bf16[8,16]{1,0:T(8,128)} all-gather(%a), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={1}, frontend_attributes={chain_id="4"}
}

%beside (a: bf16[8,4]) -> bf16[8,16] {
  %all-gather.2 = bf16[8,16]{1,0:T(8,128)S(1)} all-gather(%a), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={1}, frontend_attributes={chain_id="4"}
}

%done (a: bf16[8,4]) -> bf16[8,16] {
  %all-gather.3 = bf16[8,16]{1,0:T(8,128)} all-gather(%a), channel_id=9, replica_groups={{0,1,2,3}}, dimensions={1}, frontend_attributes={chain_id="4"}
}

%body (p: s32[]) -> s32[] {
  %fusion.1 = bf16[8,16]{1,0} fusion(%x), kind=kCustom, calls=%begins
  %fusion.2 = bf16[8,16]{1,0} fusion(%x), kind=kCustom, calls=%beside
  ROOT %fusion.3 = bf16[8,16]{1,0} fusion(%x), kind=kCustom, calls=%done
}

ENTRY %main (a: f32[8]) -> f32[8] {
  %while.1 = s32[] while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %fusion.4 = bf16[8,16]{1,0} fusion(%x), kind=kCustom, calls=%begins
  ROOT %copy.1 = f32[8]{0} copy(%a)
}
"""


def test_what_is_written_in_parts_counts_once():
    (gather,) = collectives(CHAINED, 4)
    assert gather == Collective("all-gather", "bf16[8,16]", 4, 6, 8 * 16 * 2 * 3 / 4)
