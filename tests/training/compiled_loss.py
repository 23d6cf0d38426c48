"""Compiles the loss for an H200 ahead of time; prints the number of reads of its logits as JSON.

`test_loss_reads.py` runs it in a separate process, with the compiler for GPUs on its path. Nothing
is executed and no array is made, so that shapes have real sizes.
"""

import collections
import json
import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dms_jax.training.losses import Head, token_losses
from dms_jax.training.xla_options import compiler_options
from tests.support import gpu_compiler
from tests.support.ahead import compile_ahead

BATCH, LENGTH, HIDDEN, VOCABULARY, CHUNK = 4, 512, 896, 151_936, 256
ROWS = BATCH * CHUNK


def loss_and_gradients(hidden, teacher_hidden, matrix, targets, mask, *, direction):
    """The main loss of a student and its gradients."""

    def main(hidden, parameter):
        losses = token_losses(
            Head(hidden, matrix, parameter),
            Head(teacher_hidden, matrix),
            targets=targets,
            mask=mask,
            target_mask=mask,
            direction=direction,
            chunk=CHUNK,
        )
        return losses.main, losses.language_modeling

    return jax.value_and_grad(main, (0, 1), has_aux=True)(hidden, matrix.astype(jnp.float32))


def readings(text: str) -> dict[str, int]:
    """Returns the number of kernels of each kind with float32 logits among their operands.

    "products" multiply, "others" do not, "parts" read a part of the logits. Branches of
    conditionals, whose operands are tuples, do not count.
    """
    sizes = {f"{ROWS},{VOCABULARY}", f"{BATCH},{CHUNK},{VOCABULARY}"}
    logits, found = set(), collections.Counter()
    for line in text.splitlines():
        made = re.match(r"\s+(?:ROOT )?(%\S+) = f32\[([\d,]+)\]\S* (\S+?)\((.*)", line)
        if made and made[2] in sizes and ("dot" in made[1] or made[3] == "bitcast"):
            logits.add(made[1])
        called = re.match(r"\s+(?:ROOT )?(%\S+) = .*? fusion\((.*?)\), kind=.*calls=(%\S+?),", line)
        if called:
            for place, name in enumerate(re.findall(r"%[\w.\-]+", called[2])):
                if name in logits:
                    other = "parts" if reads_part(text, called[3], place) else "others"
                    found["products" if "dot" in called[1] else other] += 1
    return dict(found)


def reads_part(text: str, computation: str, place: int) -> bool:
    """Whether a fused computation reads only slices of a parameter."""
    start = text.index(f"\n{computation} (")
    body = text[start : text.index("\n}", start)]
    names = re.findall(rf"(%\S+) = \S+ parameter\({place}\)", body)
    kinds = set()
    while names:
        name = re.escape(names.pop())
        for made, kind in re.findall(rf"(%\S+) = \S+ ([\w-]+)\([^)]*{name}[,)]", body):
            kinds.add(kind)
            names += [made] if kind == "bitcast" else []
    return kinds <= {"bitcast", "slice"}


def main() -> None:
    devices = gpu_compiler.devices("h200", 1, a_host=1)
    mesh = Mesh(np.array(devices).reshape(1, 1), ("data", "model"))
    place = NamedSharding(mesh, PartitionSpec())
    states = ((BATCH, LENGTH, HIDDEN), jnp.bfloat16)
    shapes = (
        states,
        states,
        ((VOCABULARY, HIDDEN), jnp.bfloat16),
        ((BATCH, LENGTH), jnp.int32),
        ((BATCH, LENGTH), jnp.bool_),
    )
    arrays = [jax.ShapeDtypeStruct(*each, sharding=place) for each in shapes]
    step = jax.jit(
        loss_and_gradients,
        static_argnames="direction",
        compiler_options=compiler_options(devices),
    )
    found = {}
    for direction in sys.argv[1:]:
        lowered = step.lower(*arrays, direction=direction)
        found[direction] = readings(compile_ahead(lowered, "h200").text)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
