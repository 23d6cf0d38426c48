"""What surrounds a fetch of values: the scores, the largest of them, and the prompt's copies."""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

HEADS, KV_HEADS, HEAD_DIM, CONTEXT, LAYERS = 32, 8, 128, 32768, 4
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def seconds(call, *arguments) -> float:
    """Median time of a call, compiled and warm."""
    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def two_stage(scores, top):
    """The N largest lie on the N pages with the largest maxima."""
    rows = len(scores)
    pages = scores.reshape(rows, -1, 64)
    _, best = jax.lax.top_k(pages.max(-1), min(top, pages.shape[1]))
    chosen = jnp.take_along_axis(pages, best[..., None], axis=1)
    values, at = jax.lax.top_k(chosen.reshape(rows, -1), top)
    return values, jnp.take_along_axis(best, at // 64, axis=1) * 64 + at % 64


def by_threshold(scores, top):
    """The N-th largest by bisection over the bits of a float, then their places by a scan."""
    bits = jax.lax.bitcast_convert_type(scores, jnp.int32)
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # ascending as integers

    def halve(_, ends):
        low, high = ends
        middle = (low & high) + ((low ^ high) >> 1)
        enough = (order >= middle[:, None]).sum(-1) >= top
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    rows = scores.shape[0]
    least, most = jnp.iinfo(jnp.int32).min, jnp.iinfo(jnp.int32).max
    ends = (jnp.full(rows, least, jnp.int32), jnp.full(rows, most, jnp.int32))
    low, _ = jax.lax.fori_loop(0, 32, halve, ends)
    above = order > low[:, None]
    equal = order == low[:, None]
    room = top - above.sum(-1, keepdims=True)
    chosen = above | (equal & (jnp.cumsum(equal, -1) <= room))
    place = jnp.where(chosen, jnp.cumsum(chosen, -1) - 1, top)
    index = jnp.broadcast_to(jnp.arange(scores.shape[1], dtype=jnp.int32), scores.shape)
    out = jnp.zeros((rows, top), jnp.int32)
    out = out.at[jnp.arange(rows)[:, None], place].set(index, mode="drop")
    return jnp.take_along_axis(scores, out, axis=1), out


def measure_top() -> dict:
    """Microseconds of the top 128 of a layer's scores, and of the scores themselves."""
    report = {}
    for batch in (1, 8):
        scores = jax.random.normal(jax.random.key(0), (batch * HEADS, CONTEXT), jnp.float32)
        want = np.sort(np.asarray(jax.lax.top_k(scores, 128)[0]))
        ways = {
            "top_k": lambda s: jax.lax.top_k(s, 128),
            "two stages": lambda s: two_stage(s, 128),
            "threshold": lambda s: by_threshold(s, 128),
        }
        for name, way in ways.items():

            @jax.jit
            def run(scores, way=way):
                def body(carry, _):
                    values, index = way(scores + carry)
                    return values.sum() * 0, (values[0], index[0, 0])

                return jax.lax.scan(body, jnp.zeros(()), length=8)[1]

            once = np.sort(np.asarray(jax.jit(way)(scores)[0]))
            report[f"{name}, batch {batch}"] = {
                "microseconds": seconds(run, scores) / 8 * 1e6,
                "right": bool(np.array_equal(once, want)),
            }
    return report


def measure_scores() -> dict:
    """Microseconds of decode attention over keys and values, and over keys alone for scores."""
    from pallas_kernels import decode_attention

    report = {}
    for batch in (1, 8):
        pages = CONTEXT // 64
        rows = batch * KV_HEADS
        pool = jax.random.normal(jax.random.key(0), (2, rows * pages, 64, HEAD_DIM), jnp.bfloat16)
        table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
        lengths = jnp.full(rows, CONTEXT, jnp.int32)
        q = jax.random.normal(jax.random.key(1), (rows, HEADS // KV_HEADS, HEAD_DIM), jnp.bfloat16)

        @functools.partial(jax.jit, static_argnames="scored")
        def loop(q, k, v, table, lengths, scored):
            def body(q, _):
                out: Any = decode_attention(
                    q, k, v, table, lengths, scale=0.1, return_lse=scored, return_scores=scored
                )
                out = out[0] + out[1][..., None].astype(q.dtype) if scored else out
                return (q + 1e-3 * out).astype(q.dtype), None

            return jax.lax.scan(body, q, length=16)[0]

        k, v = pool[0], pool[1]
        for name, values, scored in (
            ("keys and values", v, False),
            ("keys and values, with scores", v, True),
            ("keys alone, with scores", k, True),
        ):
            taken = seconds(loop, q, k, values, table, lengths, scored) / 16
            report[f"{name}, batch {batch}"] = taken * 1e6
    return report


def measure_overlap() -> dict:
    """Seconds of 16 layers of a prompt of 8192 tokens that hand their values over, or do not."""
    tokens, embed, feed = 8192, 4096, 14336
    keys = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(keys[0], (tokens, embed), jnp.bfloat16)
    up = jax.random.normal(keys[1], (embed, feed), jnp.bfloat16) * 0.01
    down = jax.random.normal(keys[2], (feed, embed), jnp.bfloat16) * 0.01

    def prompt(x, place):
        def body(x, _):
            values = x[:, : KV_HEADS * HEAD_DIM]
            if place is not None:
                values = jax.device_put(values, place)
            return x + jnp.tanh(x @ up) @ down, values

        return jax.lax.scan(body, x, length=16)

    report = {}
    for name, place in (("values stay", None), ("values leave inside the program", HOST)):
        try:
            run = jax.jit(functools.partial(prompt, place=place))
            _, values = run(x)
            report[name] = seconds(run, x)
            report[f"{name}: memory"] = values.sharding.memory_kind
        except Exception as error:
            report[name] = f"{type(error).__name__}: {error}"[:300]
    run = jax.jit(functools.partial(prompt, place=None))

    def two_chunks(copy):
        y, values = run(x)
        if copy:
            values.copy_to_host_async()
        return jax.block_until_ready(run(y)[0]) if copy else run(y)[0]

    report["two chunks"] = seconds(two_chunks, False)
    report["two chunks, the first one's values copied meanwhile"] = seconds(two_chunks, True)
    size = 16 * tokens * KV_HEADS * HEAD_DIM * 2
    report["bytes of values"] = size
    return report
