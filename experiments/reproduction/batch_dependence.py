"""How often a greedy answer depends on what else is in the batch, and which operations make it so.

    python -m experiments.reproduction.batch_dependence --out experiments/results/batch/cpu.json

Each prompt is answered alone, in an engine of one lane (`--lanes-alone` for more, the others idle),
and again in other arrangements: in batches, in pages of another size, in a pool that is too small,
so that requests are put back and recomputed, in prompt chunks of another width. An answer that
differs in any token counts. Where a model's next word is open (prompts of random tokens) two tokens
are often nearly as likely; where it has a problem to solve they seldom are.

The second table hands the same rows of numbers to each operation of a step in batches of several
sizes, and says what share of the results differ in any bit from those of one row at a time.
"""

import dataclasses
import functools
import inspect
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
import numpy as np

import dms_jax
from dms_jax import assets
from dms_jax.command_line.options import SHIPPED, check_names
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.data.tasks import Arithmetic, LinearEquation, Task, WordChain
from dms_jax.generation import Engine, programs
from dms_jax.generation.programs import GPU_OPTIONS, GPU_STEP_OPTIONS, ON_GPU_STEP, Program
from dms_jax.model.language_model import LanguageModel
from pallas_kernels import decode_attention

Dtype = Literal["bfloat16", "float32"]
TASKS: tuple[Task, ...] = (
    LinearEquation(),
    Arithmetic(operations=(4, 8)),
    WordChain(steps=(4, 10)),
)
ROWS, SIZES = 64, (1, 2, 4, 16, 64)
PAGE, PAGES_A_ROW = 64, 4


@dataclasses.dataclass(frozen=True)
class Arrangement:
    """How requests share an engine.

    Attributes:
      lanes: of the engine; one request at a time where it says so.
      together: whether all requests are given at once.
      options: of the engine.
      share: of the memory that all lanes can need; less than 1 puts requests back.
    """

    lanes: int
    together: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    share: float | None = None


ARRANGEMENTS = {
    "a batch of 4": Arrangement(lanes=4),
    "a batch of 24": Arrangement(lanes=24),
    "alone in 24 lanes": Arrangement(lanes=24, together=False),
    "a batch of 24, pages of 16": Arrangement(lanes=24, options={"page_size": 16}),
    "a batch of 24, a quarter of the memory": Arrangement(lanes=24, share=0.25),
    "a batch of 24, prompts by 16": Arrangement(lanes=24, options={"prefill_chunk": 16}),
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Measure how often greedy answers depend on the batch."""

    models: tuple[str, ...] = ("reasoner-11m", "reasoner-11m-dms")
    """Shipped models, each under its own policy."""
    dtypes: tuple[Dtype, ...] = ("bfloat16", "float32")
    """Types of the weights, the cache and the activations."""
    arrangements: tuple[str, ...] = tuple(ARRANGEMENTS)
    """Arrangements of a batch that are compared with a request alone."""
    lanes_alone: int = 1
    """Lanes of the engine that answers one request at a time; one lane multiplies single rows."""
    prompts: int = 24
    """Prompts of each kind: random tokens, and problems of tasks."""
    new_tokens: int = 64
    """Tokens of each greedy answer."""
    seed: int = 0
    """Seed of the random prompts."""
    excess_precision: bool = False
    """Whether XLA may leave out roundings to bfloat16, as it may unless told (the state before)."""
    parts: bool = True
    """Whether to compare the operations of a step as well."""
    out: pathlib.Path | None = None
    """JSON file for the figures, with device, versions, date and command."""


def main(config: Config) -> dict[str, Any]:
    """Measures, prints, writes the file."""
    if config.out is not None:
        make_place("--out", config.out)
    check_names("--models", config.models, SHIPPED)
    check_names("--arrangements", config.arrangements, ARRANGEMENTS)
    report: dict[str, Any] = provenance(config) | {"answers": [], "parts": []}
    if config.excess_precision:
        _allow_excess_precision()
    for name in config.models:
        for dtype in config.dtypes:
            model = dms_jax.load(assets.path(name), dtype=dtype)
            named = {"model": name, "policy": model.policy.name, "dtype": dtype}
            for row in measure_answers(model, config):
                report["answers"].append(named | row)
                _print_answers(report["answers"][-1])
                _write(config, report)
            if config.parts:
                report["parts"].append(named | {"differ": compare_parts(model)})
                for part, differ in report["parts"][-1]["differ"].items():
                    told = ", ".join(f"{size}: {share:.1e}" for size, share in differ.items())
                    print(f"{name} {dtype}, {part}, share that differs by batch: {told}")
                _write(config, report)
    return report


def _allow_excess_precision() -> None:
    """Compiles the programs of generation as XLA would if it were not told to round."""
    free = {"xla_allow_excess_precision": True}
    options: dict[str, Any] = dict(other_options=free, donate_argnums=1)
    programs.extend = Program(
        inspect.unwrap(programs.extend),
        gpu_options=GPU_OPTIONS | free,
        static_argnums=(9, 10),
        **options,
    )
    programs.decode = Program(
        inspect.unwrap(programs.decode),
        gpu_options=GPU_STEP_OPTIONS | free,
        on_gpu=ON_GPU_STEP,
        static_argnums=(9, 10),
        **options,
    )


def _write(config: Config, report: dict[str, Any]) -> None:
    if config.out is not None:
        write_json(config.out, report)


def _print_answers(row: dict[str, Any]) -> None:
    print(
        f"{row['model']} {row['dtype']}, {row['prompts']}, {row['arrangement']}: "
        f"{row['differ']} of {row['of']} differ, first at {row['first_difference']} "
        f"({row['seconds']:.1f} s; alone {row['seconds_alone']:.1f} s)",
        flush=True,
    )


# -- answers --------------------------------------------------------------------------------------


def prompts_of(model: LanguageModel, config: Config) -> dict[str, list[list[int]]]:
    """Token ids of both kinds."""
    random = np.random.default_rng(config.seed)
    lengths = random.integers(20, 90, size=config.prompts)
    vocabulary = model.config.vocab_size
    problems = [
        TASKS[i % len(TASKS)].problem("test", i // len(TASKS)) for i in range(config.prompts)
    ]
    return {
        "random tokens": [random.integers(3, vocabulary, size=n).tolist() for n in lengths],
        "tasks": [model.tokenizer.encode(problem.prompt) for problem in problems],
    }


def measure_answers(model: LanguageModel, config: Config) -> Iterator[dict[str, Any]]:
    """Yields, for each arrangement and kind of prompt, how many answers differ from those alone."""
    kinds = prompts_of(model, config)
    alone = answer(model, Arrangement(lanes=config.lanes_alone, together=False), kinds, config)
    for name in config.arrangements:
        found = answer(model, ARRANGEMENTS[name], kinds, config)
        for kind, prompts in kinds.items():
            pairs = zip(alone[kind][0], found[kind][0], strict=True)
            first = [differing for left, right in pairs if (differing := where(left, right)) >= 0]
            yield {
                "prompts": kind,
                "arrangement": name,
                "differ": len(first),
                "of": len(prompts),
                "first_difference": sorted(first),
                "seconds": found[kind][1],
                "seconds_alone": alone[kind][1],
            }


def answer(
    model: LanguageModel, how: Arrangement, kinds: dict[str, list[list[int]]], config: Config
) -> dict[str, tuple[list[list[int]], float]]:
    """Greedy answers of each kind, and the seconds they took, compilation included."""
    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=config.new_tokens)
    longest = max(len(prompt) for prompts in kinds.values() for prompt in prompts)
    options: dict[str, Any] = dict(
        num_lanes=how.lanes,
        max_tokens=longest + config.new_tokens,
        prefill_chunk=128,
        table_width=PAGES_A_ROW if how.options.get("page_size", PAGE) == PAGE else None,
    )
    engine = Engine(model, **(options | how.options))
    if how.share is not None:
        pages = engine.runner.reservation.allocator.pages_per_shard
        held = int(how.share * pages) * engine.runner.page_bytes
        engine = Engine(model, memory=held, **(options | how.options))
    answers = {}
    for kind, prompts in kinds.items():
        start = time.perf_counter()
        calls = [prompts] if how.together else [[prompt] for prompt in prompts]
        done = [each.tokens for call in calls for each in engine.generate(call, sampling=sampling)]
        answers[kind] = (done, time.perf_counter() - start)
    return answers


def where(left: list[int], right: list[int]) -> int:
    """The first token in which two answers differ, -1 for none."""
    pairs = enumerate(zip(left, right, strict=False))
    return next(
        (i for i, (a, b) in pairs if a != b),
        -1 if len(left) == len(right) else min(map(len, (left, right))),
    )


# -- operations -----------------------------------------------------------------------------------


def compare_parts(model: LanguageModel) -> dict[str, dict[int, float]]:
    """For each operation and size of batch, the share of its results that differ from size 1."""
    shape, transformer = model.config, model.transformer
    layer = jax.tree.map(lambda x: x[0], transformer.layers)
    keys = iter(jax.random.split(jax.random.key(0), 8))

    def rows(*dims: int):
        return jax.random.normal(next(keys), (ROWS, 1, *dims), model.dtype)

    stream = rows(shape.hidden_size)
    parts: dict[str, tuple[Any, Any]] = {
        "norm": (layer.attention_norm, stream),
        "queries, keys, values": (layer.attention.qkv_proj, stream),
        "attention's output": (layer.attention.o_proj, rows(shape.num_heads, shape.head_dim)),
        "feed-forward": (layer.mlp, stream),
        "logits": (transformer.unembed, stream),
    }
    if layer.adapter is not None:
        parts["decisions"] = (layer.adapter, stream)
    found = {}
    for name, (function, x) in parts.items():
        program = Program(lambda x, function=function: function(x))  # with a step's options
        found[name] = shares(lambda part, program=program, x=x: program(x[part]))
    found["attention over the cache"] = shares(_attention(model))
    return found


def _attention(model: LanguageModel):
    """Decode attention of some rows, whose lengths are uneven."""
    config = model.config
    keys = jax.random.split(jax.random.key(1), 3)
    pages = (ROWS * PAGES_A_ROW, PAGE, config.head_dim)
    q = jax.random.normal(keys[0], (ROWS, config.group_size, config.head_dim), model.dtype)
    k, v = (jax.random.normal(key, pages, model.dtype) for key in keys[1:])
    lengths = np.random.default_rng(2).integers(1, PAGE * PAGES_A_ROW, size=ROWS, dtype=np.int32)
    table = np.arange(len(k), dtype=np.int32).reshape(ROWS, PAGES_A_ROW)
    attend = Program(functools.partial(decode_attention, scale=config.head_dim**-0.5))
    return lambda part: attend(q[part], k, v, table[part], lengths[part])


def shares(operation: Callable[[slice], Any]) -> dict[int, float]:
    """The share of numbers that are not those of size 1, all rows taken in batches of a size."""
    results = {}
    for size in SIZES:
        parts = [slice(start, start + size) for start in range(0, ROWS, size)]
        results[size] = np.concatenate([np.asarray(operation(part)) for part in parts])
    return {size: float(np.mean(result != results[1])) for size, result in results.items()}


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
