"""Time training attention with the DMS mask against cuDNN's plain causal attention.

Runs on one GPU. Every shape is first checked against the float32 XLA reference on fresh random
data. Times are sums of kernel times by the profiler (CUPTI), medians over rounds in which the
contenders take turns. Where PyTorch is installed, FlexAttention carrying the same mask is timed
beside them with device events. The memory of forward and backward is read from compiled programs.

    python -m experiments.benchmarks.training_kernels --out experiments/results/kernels
"""

import dataclasses
import datetime
import json
import math
import os
import pathlib
import statistics
import sys
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import profiler

from dms_jax.command_line.options import check_names
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import run
from dms_jax.json_text import json_text
from experiments.benchmarks.kernel_timing import command_line, require_gpu, versions
from experiments.benchmarks.settings import check_numbers
from pallas_kernels.training import cases, reference, retrofit_attention
from pallas_kernels.training.inputs import Inputs

IMPLEMENTATIONS = ("mosaic_gpu", "mosaic_mma", "xla")
MEMORY_LENGTHS = (4096, 8192, 16384, 32768, 65536, 131072)


def draw(case: cases.TrainingCase, key: jax.Array) -> tuple[dict, jax.Array | None]:
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


def contenders(case: cases.TrainingCase, segments: jax.Array | None, implementation: str) -> dict:
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


def check(case: cases.TrainingCase, key: jax.Array, implementation: str) -> dict:
    """Relative errors (norm-wise) against the float32 reference, at a short length."""
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
    wanted = [np.asarray(x, np.float64) for x in expected(*jax.device_put(operands, host))]
    run = contenders(short, segments, implementation)["dms.forward_backward"]
    operands = tuple(arrays[name] for name in ("q", "k", "v", "bias", "do"))
    results = [run(*operands) for _ in range(2)]
    flat = [[np.asarray(x, np.float64) for x in jax.tree.leaves(result)] for result in results]
    names = ("output", "dq", "dk", "dv", "dbias")
    errors = {
        name: float(np.linalg.norm(got - want) / np.linalg.norm(want))
        for name, got, want in zip(names, flat[0], wanted, strict=True)
    }
    errors["same_bits_twice"] = all(map(np.array_equal, *flat))
    return errors


def measure(functions: dict, operands: tuple, rounds: int) -> dict:
    """Median kernel milliseconds of every function; they take turns in each round."""
    compiled, refused = {}, {}
    for name, function in functions.items():
        try:
            compiled[name] = function.lower(*operands).compile()
        except Exception as error:  # cuDNN refuses some shapes, each with its own error type.
            refused[name] = str(error).splitlines()[0][:200]
    if any(name.startswith("dms") for name in refused):
        raise RuntimeError(f"our own kernels did not compile: {refused}")
    timers = {
        name: profiler.Cupti(finalize=False).measure(f, aggregate=False, iterations=1)
        for name, f in compiled.items()
    }
    times = {name: [] for name in compiled}
    kernels = {name: {} for name in compiled}
    for _ in range(rounds):
        for name, timer in timers.items():
            launches: Any = timer(*operands)[1]
            assert launches, "the profiler saw no kernel"
            times[name].append(sum(duration for _, duration in launches))
            for kernel, duration in launches:
                kernels[name].setdefault(kernel[:80], []).append(duration)
    for name, reason in refused.items():
        print(f"  {name}: {reason}")
    return {
        name: {
            "milliseconds": statistics.median(values),
            "spread": [min(values), max(values)],
            "kernels": {k: statistics.median(v) for k, v in kernels[name].items()},
        }
        for name, values in times.items()
    }


def measure_flex(case: cases.TrainingCase) -> dict | None:
    """FlexAttention with the DMS mask, or None where PyTorch is missing."""
    try:
        import torch  # pyright: ignore[reportMissingImports]
        from torch.nn.attention.flex_attention import (  # pyright: ignore[reportMissingImports]
            create_block_mask,
            flex_attention,
        )
        from triton.testing import do_bench  # pyright: ignore[reportMissingImports]
    except ImportError:
        return None
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


def flops(case: cases.TrainingCase, part: str) -> float:
    """The field's count for causal attention: 2 matmuls forward, 5 more backward."""
    forward = 4 * case.B * case.H * case.T**2 * case.D / 2
    return forward * (1.0 if part == "forward" else 3.5)


def memory_of(length: int, implementation: str) -> dict:
    """Bytes of forward plus backward at one length, by the compiled program."""
    case = dataclasses.replace(cases.BARS[0], T=length)
    arrays, _ = jax.eval_shape(lambda key: draw(case, key), jax.random.key(0))
    run = contenders(case, None, implementation)["dms.forward_backward"]
    operands = tuple(arrays[name] for name in ("q", "k", "v", "bias", "do"))
    analysis = run.lower(*operands).compile().memory_analysis()
    return {
        "T": length,
        "temporary_bytes": analysis.temp_size_in_bytes,
        "argument_bytes": analysis.argument_size_in_bytes,
        "output_bytes": analysis.output_size_in_bytes,
    }


CONTENDERS = {
    "dms": ("this kernel, DMS's mask", "#c0392b"),
    "cudnn_causal": ("cuDNN, plain causal", "#2471a3"),
    "flex_dms": ("FlexAttention", "#7d8c2f"),
}


def draw_picture(report: dict, path: pathlib.Path) -> None:
    """Speed of each contender at the shapes of the bars, and memory against length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    timed = [x for x in report["speed"] if x["case"]["name"] in {c.name for c in cases.BARS}]
    names = [name for name in timed[0]["times"] if name.endswith("forward_backward")]
    for index, name in enumerate(names):
        rates = [x["times"].get(name, {}).get("tflops", math.nan) for x in timed]
        at = np.arange(len(timed)) + 0.25 * index
        label, colour = CONTENDERS[name.split(".")[0]]
        bars = left.bar(at, rates, 0.23, color=colour)
        left.bar_label(bars, [f"{rate:.0f}" for rate in rates], fontsize=8)
        left.bar_label(bars, [label] * len(rates), label_type="center", rotation=90, color="white")
    left.set_xticks(np.arange(len(timed)) + 0.25, [f"{x['case']['T']:,} tokens" for x in timed])
    left.set_ylabel("forward and backward, TFLOP/s")
    left.set_ylim(top=1.05 * left.get_ylim()[1])
    lengths = [x["T"] for x in report["memory"]]
    right.plot(lengths, [x["temporary_bytes"] / 2**20 for x in report["memory"]], "o-")
    right.set(xscale="log", yscale="log", xlabel="tokens", ylabel="memory beside operands, MiB")
    right.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    right.set_yticks([1, 3, 10, 30], ["1", "3", "10", "30"])
    right.minorticks_off()
    figure.suptitle(f"Training attention with the DMS mask, {report['device']}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


@dataclasses.dataclass(frozen=True)
class Config:
    """Time training attention."""

    out: pathlib.Path = pathlib.Path("runs/training_kernels")
    """Folder for training_kernels.json and the figure."""
    rounds: int = 9
    """Timed rounds; the median counts."""
    implementation: str = "mosaic_gpu"
    """What serves the attention with DMS's mask: mosaic_gpu, mosaic_mma or xla."""
    cases: tuple[str, ...] = tuple(case.name for case in cases.SPEED)
    """Cases to time, by name; all of the benchmark's unless given."""
    memory: bool = True
    """Also read the memory of compiled programs, and draw the figure."""
    flex: bool = True
    """Also time FlexAttention, where PyTorch is installed."""

    def __post_init__(self):
        check_numbers(self)


def main(config: Config) -> None:
    """Checks, measures, prints, and writes the report."""
    check_names("--cases", config.cases, (case.name for case in cases.SPEED))
    check_names("--implementation", (config.implementation,), IMPLEMENTATIONS)
    require_gpu()
    make_folder("--out", config.out)
    seed = int.from_bytes(os.urandom(4), "little")
    report = {
        "command": command_line(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "device": jax.devices()[0].device_kind,
        "versions": versions(),
        "implementation": config.implementation,
        "seed": seed,
        "timing": "sum of kernel times by CUPTI, median of rounds, contenders taking turns; "
        "FlexAttention by device events",
        "flops": "4 B H T^2 D / 2 forward, 3.5 times that with backward, for every contender",
        "speed": [],
        "memory": [],
    }
    target = config.out / "training_kernels.json"
    key = jax.random.key(seed)
    for case in cases.SPEED:
        if case.name not in config.cases:
            continue
        key, check_key, data_key = jax.random.split(key, 3)
        errors = check(case, check_key, config.implementation)
        arrays, segments = draw(case, data_key)
        operands = tuple(arrays[name] for name in ("q", "k", "v", "bias", "do"))
        functions = contenders(case, segments, config.implementation)
        times = measure(functions, operands, config.rounds)
        if case in cases.BARS and config.flex:
            times |= measure_flex(case) or {}
        for name, entry in times.items():
            part = name.split(".")[1]
            entry["tflops"] = flops(case, part) / entry["milliseconds"] / 1e9
        ratios = {
            f"{other}.{part}": times[f"{other}.{part}"]["milliseconds"]
            / times[f"dms.{part}"]["milliseconds"]
            for other in ("cudnn_causal", "flex_dms")
            for part in ("forward", "forward_backward")
            if f"{other}.{part}" in times
        }
        entry = {"case": dataclasses.asdict(case), "errors": errors, "times": times}
        report["speed"].append(entry | {"times_faster_than": ratios})
        print(case.name, json.dumps(errors))
        for name, values in times.items():
            print(f"  {name:32s} {values['milliseconds']:9.3f} ms {values['tflops']:7.1f} TFLOP/s")
        print(
            "  times faster:", {name: round(value, 3) for name, value in ratios.items()}, flush=True
        )
        target.write_text(json_text(report, indent=1))
    if config.memory:
        for length in MEMORY_LENGTHS:
            report["memory"].append(memory_of(length, config.implementation))
            print(report["memory"][-1], flush=True)
        target.write_text(json_text(report, indent=1))
        draw_picture(report, config.out / "training_kernels.png")


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
