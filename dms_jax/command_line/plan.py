"""What a retrofit takes before it is paid for: memory and seconds. No accelerator needed.

    dms-jax plan --model llama-3.2-1b --machine 8xh200
    dms-jax plan --model qwen-r1-32b --machine v5p-128 --paper-model qwen-r1-32b
    dms-jax plan --model path/to/model --machine v6e-256 --model-shards 4

The step of each stage is compiled ahead of time by libtpu (pip install 'dms-jax[tpu]', on Linux),
which takes some minutes. The figures of GPUs are estimates from a TPU's program.
"""

import dataclasses
import json
import os
import pathlib
import sys
from importlib import metadata
from typing import Any, Literal, cast

import jax

import dms_jax
from dms_jax.checkpoint import gguf
from dms_jax.command_line.options import SHIPPED, find_model
from dms_jax.command_line.reports import make_place, provenance, read_file, write_json
from dms_jax.command_line.retrofitting import UPDATES
from dms_jax.command_line.retrofitting import Config as Retrofit
from dms_jax.command_line.shapes import LENGTHS, SHAPES, Shape, cache_sizes
from dms_jax.config import ModelConfig
from dms_jax.model.rematerialisation import Remat
from dms_jax.training.planning import find_machine, plan

# What the figures of a plan depend on.
COMPILERS = ("jax", "jaxlib", "libtpu")
# Without a TPU, libtpu is not to look for one, nor to lock it against other processes that compile.
NO_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Config:
    """Print what a retrofit takes on some machine."""

    model: str = "llama-3.2-1b"
    """A shape by name (those of the models page, such as llama-3.2-1b, qwen3-30b-a3b, gpt-oss-20b),
    a model that ships, a GGUF file, or a directory with a config.json."""
    machine: tuple[str, ...] = ("8xh200",)
    """TPU slices ("v5p-128", "v6e-256") or numbers of devices ("8xh200"); each gets a plan."""
    model_shards: int = 1
    """Devices along which heads and feed-forward are split; the others split sequences."""
    expert_shards: int = 1
    """Devices along which heads and whole experts are split, for mixtures of experts."""
    sequence_shards: int = 1
    """Devices along which the tokens of each sequence are split."""

    recipe: Literal["published", "paper", "quickstart", "dmc_paper", "dmc_quickstart"] = "paper"
    """This and the options down to --remat are those of dms-jax retrofit."""
    paper_model: str | None = None
    """A row of a paper's tables ("qwen-r1-7b"), or "text" for 100 steps a unit of ratio."""
    compression_ratio: float | None = None
    """Compression ratio at which the training ends. The recipe's own unless given."""
    policy: Literal["DMS", "DMC", "FixedPooling"] | None = None
    """What is learned. The recipe's own unless given."""
    source: Literal["adapter", "query_neuron"] | None = None
    """Who decides under DMS. The recipe's own unless given."""
    trainable: Literal["recipe", "adapter", "low_rank", "all"] = "recipe"
    """What is trained: the adapter alone, low-rank updates of attention with it, or all."""
    rank: int = UPDATES.rank
    """Rank of the low-rank updates of attention; unused unless trainable is low_rank."""
    steps: int | None = None
    """Optimizer steps of the whole run."""
    tokens: int | None = None
    """Tokens of the whole run, in place of steps."""
    sequence_length: int | None = None
    """Tokens a training sequence. Unless given those of the recipe, or as many as the model has
    positions for."""
    batch_size: int | None = None
    """Sequences an optimizer step; the recipe's unless given."""
    micro_batch_size: int | None = None
    """Sequences a device passes forward and back at a time; the recipe's unless given."""
    remat: Remat | Literal["auto"] | None = None
    """What the backward pass computes again of each layer, from what takes the most memory to what
    takes the least; "auto" chooses by the device's memory. The recipe's own unless given."""

    out: pathlib.Path | None = None
    """A JSON file for the plans, with what they were made by and when."""

    def retrofit(self) -> Retrofit:
        """The retrofit that is planned."""
        shared = {field.name for field in dataclasses.fields(Retrofit)} - {"model", "out"}
        told = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name in shared - {"model_shards", "expert_shards", "sequence_shards"}
        }
        return Retrofit(model=self.model, data=(), out=pathlib.Path("runs/plan"), **told)


def shape_of(model: str) -> ModelConfig:
    """The shape of a name, of a model that ships, of a GGUF file, or of a directory."""
    if model in SHAPES:
        return SHAPES[cast(Shape, model)]
    path = pathlib.Path(find_model(model)).expanduser()
    if gguf.is_gguf(path):
        return gguf.read_model(gguf.GgufFiles(path))[0]
    if not path.is_dir():
        raise dms_jax.ConfigError(
            f"--model {model}: no directory or GGUF file, and none of the shapes "
            f"{', '.join(SHAPES)}, nor a model that ships ({', '.join(SHIPPED)})."
        )
    content = read_file("--model", path / "config.json")
    try:
        return ModelConfig.from_hf(json.loads(content))
    except ValueError as error:
        raise dms_jax.ConfigError(f"--model {model}: config.json is not JSON: {error}") from error


def main(config: Config) -> None:
    """Prints the plan of each machine that was named."""
    jax.config.update("jax_platforms", "cpu")
    for name, value in NO_TPU.items():
        os.environ.setdefault(name, value)
    shape, chosen = shape_of(config.model), config.retrofit()
    if config.out is not None:
        make_place("--out", config.out)
    for machine in config.machine:  # all of them, before the first is compiled for
        find_machine(machine)
    told = {} if config.out is None else made_by(config)
    plans: list[dict[str, Any]] = []
    for machine in config.machine:
        print(f"Compiling for {machine}, which takes minutes ...", file=sys.stderr)
        made = plan(
            shape,
            chosen.make_policy(),
            recipe=chosen.make_recipe(shape.max_position_embeddings),
            machine=machine,
            model_shards=config.model_shards,
            expert_shards=config.expert_shards,
            sequence_shards=config.sequence_shards,
        )
        print(f"{made}\n", flush=True)
        if config.out is not None:  # each as it comes: compiling the next may take long
            plans.append({"model": config.model, **made.figures()})
            write_json(config.out, told | {"plans": plans})
    print(caches(shape, chosen))


def caches(shape: ModelConfig, chosen: Retrofit) -> str:
    """What a sequence's cache takes by length, before the retrofit and after it."""
    policy, recipe = chosen.make_policy(), chosen.make_recipe(shape.max_position_embeddings)
    lines = [f"Cache of a sequence, and under {policy} at {recipe.compression_ratio:g}x:"]
    for tokens in LENGTHS:
        if tokens <= shape.max_position_embeddings:
            sizes = cache_sizes(shape, policy, recipe.compression_ratio, tokens)
            lines.append(f"  {tokens:>7,} tokens {sizes[0]:>10} MB {sizes[1]:>10} MB")
    return "\n".join(lines)


def made_by(config: Config) -> dict[str, Any]:
    """How, when and by which compilers plans were made."""
    versions = {each.metadata["Name"]: each.version for each in metadata.distributions()}
    found = {name: versions[name] for name in COMPILERS if name in versions}
    told = provenance(config)
    device = "none: compiled ahead of time"
    return told | {"device": device, "versions": told["versions"] | found}
