"""Kernels over many queries: training attention with DMS's mask, and chunks of prompts.

Each is checked against the float32 XLA reference on fresh random data. Times are sums of kernel
times by CUPTI, medians over rounds in which the contenders alternate.
"""

import dataclasses
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.benchmarks.timing import kernel_medians, time_in_turns
from pallas_kernels import prefill_attention
from pallas_kernels.training import cases, reference, retrofit_attention
from pallas_kernels.training.cases import TrainingCase
from pallas_kernels.training.inputs import Inputs

ROUNDS = 9
MEMORY_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)
# The chunk of a prompt: Llama-3.1-8B's heads.
CHUNK, PAST, HEADS, KV_HEADS, DIM, PAGE, WINDOW = 2048, 30720, 32, 8, 128, 64, 512


def total(launches: list[tuple[str, float]]) -> float:
    """Milliseconds of all launches."""
    return sum(duration for _, duration in launches)


def norm_error(got: Any, want: Any) -> float:
    """Norm of the difference over the norm."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


# -- training --------------------------------------------------------------------------------------


def draw(case: TrainingCase, key: jax.Array) -> tuple[dict, jax.Array | None]:
    """Fresh random q, k, v, bias and output gradient, and the segment ids."""
    keys = jax.random.split(key, 6)
    q_shape = (case.B, case.T, case.H, case.D)
    kv_shape = (case.B, case.T, case.K, case.D)
    shapes = {"q": q_shape, "k": kv_shape, "v": kv_shape, "do": q_shape}
    arrays = {
        name: jax.random.normal(k, shape, case.dtype)
        for (name, shape), k in zip(shapes.items(), keys[:4], strict=True)
    }
    arrays["q"] = arrays["q"] * case.query_scale
    logits = jax.random.normal(keys[4], (case.B, case.K, case.T))
    arrays["bias"] = jax.nn.log_sigmoid(-2.0 * logits)
    segments = None
    if case.segments:
        starts = jax.random.uniform(keys[5], (case.B, case.T)) < 1.0 / case.segments
        segments = jnp.cumsum(starts, axis=1, dtype=jnp.int32)
    return arrays, segments


def operands_of(arrays: dict) -> tuple:
    """The arguments of the functions of `contenders`."""
    return tuple(arrays[name] for name in ("q", "k", "v", "bias", "do"))


def contenders(case: TrainingCase, segments: jax.Array | None, implementation: str) -> dict:
    """Forward and forward-backward functions of (q, k, v, bias, do), ours and cuDNN's."""
    scale = case.D**-0.5

    def ours(q, k, v, bias):
        return retrofit_attention(
            q,
            k,
            v,
            bias,
            window=case.window,
            scale=scale,
            segment_ids=segments,
            implementation=implementation,
        )

    def cudnn(q, k, v, bias):
        del bias
        return jax.nn.dot_product_attention(
            q, k, v, is_causal=True, scale=scale, implementation="cudnn"
        )

    def both(function):
        def run(q, k, v, bias, do):
            output, pullback = jax.vjp(function, q, k, v, bias)
            return output, pullback(do)

        return run

    def forward(function):
        return lambda q, k, v, bias, do: function(q, k, v, bias)

    functions = {"dms": ours, "cudnn_causal": cudnn}
    return {
        f"{name}.{part}": jax.jit(make(function))
        for name, function in functions.items()
        for part, make in (("forward", forward), ("forward_backward", both))
    }


def check(case: TrainingCase, key: jax.Array, implementation: str) -> dict:
    """Relative errors against the float32 reference at a short length."""
    short = dataclasses.replace(case, T=min(case.T, 1024 - 37), window=min(case.window, 200))
    short = dataclasses.replace(short, segments=min(case.segments, 150))
    arrays, segments = draw(short, key)
    exact = {name: x.astype(jnp.float32) for name, x in arrays.items()}
    settings = {"window": short.window, "scale": short.D**-0.5}

    @jax.jit
    def expected(q, k, v, bias, segments, do):
        inputs = Inputs(q, k, v, bias, segments)
        output, lse2 = reference.forward(inputs, **settings)
        return output, *reference.backward(inputs, output, lse2, do, **settings)

    host = jax.devices("cpu")[0]
    operands = (*(exact[name] for name in ("q", "k", "v", "bias")), segments, exact["do"])
    wanted = expected(*jax.device_put(operands, host))
    run = contenders(short, segments, implementation)["dms.forward_backward"]
    one, other = (jax.tree.leaves(run(*operands_of(arrays))) for _ in range(2))
    names = ("output", "dq", "dk", "dv", "dbias")
    errors: dict[str, Any] = {
        name: norm_error(got, want) for name, got, want in zip(names, one, wanted, strict=True)
    }
    errors["same_bits_twice"] = all(map(np.array_equal, one, other))
    return errors


def measure(functions: dict, operands: tuple) -> dict:
    """Median kernel milliseconds of every function."""
    compiled, refused = {}, {}
    for name, function in functions.items():
        try:
            compiled[name] = function.lower(*operands).compile(), operands
        except Exception as error:  # cuDNN refuses some shapes, each with its own error type.
            refused[name] = str(error).splitlines()[0][:200]
    if any(name.startswith("dms") for name in refused):
        raise RuntimeError(f"our own kernels did not compile: {refused}")
    for name, reason in refused.items():
        print(f"  {name}: {reason}")
    found = {}
    for name, rounds in time_in_turns(compiled, ROUNDS).items():
        times = list(map(total, rounds))
        found[name] = {
            "milliseconds": statistics.median(times),
            "spread": [min(times), max(times)],
            "kernels": kernel_medians(rounds),
        }
    return found


def measure_flex(case: TrainingCase) -> dict:
    """FlexAttention with the DMS mask, by device events; nothing without PyTorch."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
            create_block_mask,
            flex_attention,
        )
        from triton.testing import do_bench  # pyright: ignore[reportMissingImports]
    except ImportError:
        return {}
    group, window, device = case.H // case.K, case.window, "cuda"

    def normal(*shape):
        return torch.randn(*shape, device=device, dtype=torch.bfloat16).requires_grad_()

    q = normal(case.B, case.H, case.T, case.D)
    k, v = (normal(case.B, case.K, case.T, case.D) for _ in range(2))
    logits = torch.randn(case.B, case.K, case.T, device=device)
    bias = torch.nn.functional.logsigmoid(-2.0 * logits).requires_grad_()

    def add_bias(score, b, h, i, j):
        return torch.where(i - j > window, score + bias[b, h // group, j], score)

    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, case.T, case.T, device=device)
    attend = torch.compile(flex_attention, dynamic=False)

    def forward():
        return attend(q, k, v, score_mod=add_bias, block_mask=mask, enable_gqa=True)

    do = torch.randn_like(forward())

    def both():
        torch.autograd.grad(forward(), (q, k, v, bias), do)

    return {
        "flex_dms.forward": {"milliseconds": do_bench(forward, return_mode="median")},
        "flex_dms.forward_backward": {"milliseconds": do_bench(both, return_mode="median")},
    }


def flops(case: TrainingCase, part: str) -> float:
    """The usual count for causal attention: 2 matmuls forward, 5 more backward."""
    forward = 4 * case.B * case.H * case.T**2 * case.D / 2
    return forward * (1.0 if part == "forward" else 3.5)


def memory_of(length: int, implementation: str) -> dict:
    """Bytes of forward plus backward at one length, by the compiled program."""
    case = dataclasses.replace(cases.BARS[0], T=length)
    arrays, _ = jax.eval_shape(lambda key: draw(case, key), jax.random.key(0))
    run = contenders(case, None, implementation)["dms.forward_backward"]
    analysis = run.lower(*operands_of(arrays)).compile().memory_analysis()
    return {
        "T": length,
        "temporary_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
    }


def measure_case(case: TrainingCase, key: jax.Array, implementation: str) -> dict[str, Any]:
    """Checks and times one case: errors, times, and our speed relative to the others."""
    check_key, data_key = jax.random.split(key)
    errors = check(case, check_key, implementation)
    arrays, segments = draw(case, data_key)
    times = measure(contenders(case, segments, implementation), operands_of(arrays))
    if case in cases.BARS:
        times |= measure_flex(case)
    for name, entry in times.items():
        entry["tflops"] = flops(case, name.split(".")[1]) / entry["milliseconds"] / 1e9
    ratios = {
        name: entry["milliseconds"] / times[f"dms.{name.split('.')[1]}"]["milliseconds"]
        for name, entry in times.items()
        if not name.startswith("dms")
    }
    return {
        "case": dataclasses.asdict(case),
        "errors": errors,
        "times": times,
        "times_faster_than": ratios,
    }


def time_training(
    report: dict[str, Any], names: tuple[str, ...], implementation: str, write: Callable[[], None]
) -> None:
    """Times the cases of these names, and reads the memory of compiled programs."""
    report |= {
        "timing": "sum of kernel times by CUPTI, median of rounds, contenders taking turns; "
        "FlexAttention by device events",
        "flops": "4 B H T^2 D / 2 forward, 3.5 times that with backward, for every contender",
        "speed": [],
        "memory": [],
    }
    keys = jax.random.split(jax.random.key(report["seed"]), len(cases.SPEED))
    for case, key in zip(cases.SPEED, keys, strict=True):
        if case.name not in names:
            continue
        entry = measure_case(case, key, implementation)
        report["speed"].append(entry)
        print(case.name, entry["errors"])
        for name, each in entry["times"].items():
            print(f"  {name:32s} {each['milliseconds']:9.3f} ms {each['tflops']:7.1f} TFLOP/s")
        print("  times faster than:", entry["times_faster_than"], flush=True)
        write()
    for length in MEMORY_LENGTHS:
        report["memory"].append(memory_of(length, implementation))
        print(report["memory"][-1], flush=True)
        write()


# -- prompts ---------------------------------------------------------------------------------------


def draw_chunk(rng: np.random.Generator, ratio: int, past: int, chunk: int) -> dict:
    """One sequence whose heads keep past / ratio slots on average; pages in random order."""
    shares = rng.uniform(0.5, 1.5, KV_HEADS) if ratio > 1 else np.ones(KV_HEADS)
    lengths = np.minimum(past, shares / shares.mean() * past / ratio).astype(np.int32)
    columns = -(-past // PAGE)
    used = -(-lengths // PAGE)
    order = rng.permutation(used.sum())
    table = np.full((1, KV_HEADS, columns), np.iinfo(np.int32).max, np.int32)
    for head, count in enumerate(used):
        table[0, head, :count] = order[used[:head].sum() :][:count]
    # The marked keys of the last window leave as the chunk proceeds.
    until = np.full((1, KV_HEADS, columns * PAGE), 2**30, np.int32)
    if ratio > 1:
        for head, length in enumerate(lengths):
            recent = slice(max(length - WINDOW, 0), length)
            marked = rng.random(length - recent.start) < 1 - 1 / ratio
            until[0, head, recent][marked] = np.arange(len(marked))[marked]

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)

    return {
        "q": normal(1, chunk, HEADS, DIM),
        "k": normal(1, chunk, KV_HEADS, DIM),
        "v": normal(1, chunk, KV_HEADS, DIM),
        "evicted": jnp.asarray(rng.random((1, KV_HEADS, chunk)) < 1 - 1 / ratio),
        "counts": jnp.asarray([chunk], jnp.int32),
        "k_pages": normal(int(used.sum()), PAGE, DIM),
        "v_pages": normal(int(used.sum()), PAGE, DIM),
        "page_table": jnp.asarray(table),
        "past_lengths": jnp.asarray(lengths[None]),
        "past_until": jnp.asarray(until),
    }


def prompt_attention(implementation: str):
    """Prompt attention of a chunk of `draw_chunk`."""

    def attend(arrays):
        return prefill_attention(
            **arrays, window=WINDOW, scale=DIM**-0.5, implementation=implementation
        )

    return jax.jit(attend)


def check_chunk(rng: np.random.Generator, ratio: int, implementation: str) -> float:
    """Relative error against the float32 reference of a shorter chunk and past."""
    arrays = draw_chunk(rng, ratio, past=1500, chunk=600)
    exact = {n: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for n, x in arrays.items()}
    wanted = prompt_attention("xla")(jax.device_put(exact, jax.devices("cpu")[0]))
    return norm_error(prompt_attention(implementation)(arrays), wanted)


def time_prompts(report: dict[str, Any], implementation: str) -> None:
    """Times one chunk when heads keep all, a quarter or an eighth of the past; and cuDNN.

    Times include the plan of the key tiles.
    """
    rng = np.random.default_rng(report["seed"])

    def cudnn(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, scale=DIM**-0.5, implementation="cudnn")

    calls, errors, live = {}, {}, {}
    for ratio in (1, 4, 8):
        name = f"ratio_{ratio}"
        errors[name] = check_chunk(rng, ratio, implementation)
        arrays = draw_chunk(rng, ratio, PAST, CHUNK)
        live[name] = int(np.asarray(arrays["past_lengths"]).mean())
        calls[name] = prompt_attention(implementation).lower(arrays).compile(), (arrays,)
    dense = tuple(
        jnp.asarray(rng.standard_normal(shape, np.float32), jnp.bfloat16)
        for shape in ((1, CHUNK, HEADS, DIM), *[(1, PAST + CHUNK, KV_HEADS, DIM)] * 2)
    )
    # cuDNN also sees every key of the chunk, because its causal mask would start at the first key.
    calls["cudnn_dense"] = jax.jit(cudnn).lower(*dense).compile(), dense
    times = time_in_turns(calls, ROUNDS)
    report |= {
        "shape": f"chunk {CHUNK}, past {PAST}, heads {HEADS}/{KV_HEADS} of {DIM}, page {PAGE}, "
        f"window {WINDOW}, bfloat16",
        "mean_past_slots": live,
        "relative_errors": errors,
        "milliseconds": {
            name: statistics.median(map(total, rounds)) for name, rounds in times.items()
        },
        "kernels": {name: kernel_medians(rounds) for name, rounds in times.items()},
    }
    print(report["relative_errors"], report["milliseconds"], flush=True)
