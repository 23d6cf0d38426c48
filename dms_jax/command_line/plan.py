"""Estimate the memory and time of a retrofit on a machine that you do not have.

    dms-jax plan --model llama-3.2-1b --machine 8xh200
    dms-jax plan --model qwen-r1-32b --machine v5p-128 --paper-model qwen-r1-32b
    dms-jax plan --model path/to/model --machine v6e-256 --model-shards 4

The figures follow from shapes, in seconds: leave a fifth of the memory for what the compiler adds.
"""

import dataclasses
import json
import pathlib

import jax

import dms_jax
from dms_jax import assets
from dms_jax.checkpoint import gguf
from dms_jax.checkpoint.contents import HOLDS
from dms_jax.command_line.options import SHIPPED, find_model
from dms_jax.command_line.reports import make_place, provenance, read_file, write_json
from dms_jax.command_line.retrofitting import RecipeName, Training, check_window
from dms_jax.command_line.shapes import LENGTHS, SHAPES, cache_sizes
from dms_jax.config import ModelConfig
from dms_jax.policies import Policy
from dms_jax.training import Recipe
from dms_jax.training.display import short
from dms_jax.training.planning import plan


@dataclasses.dataclass(frozen=True)
class Planned:
    """The model and the machine."""

    model: str = "llama-3.2-1b"
    """A shape by name (those of the models page, such as llama-3.2-1b, qwen3-30b-a3b, gpt-oss-20b),
    a model that ships, a GGUF file, or a directory with a config.json."""
    machine: tuple[str, ...] = ("8xh200",)
    """TPU slices ("v5p-128", "v6e-256") or numbers of devices ("8xh200"); each gets a plan. The
    devices not used by the shards below split sequences."""
    out: pathlib.Path | None = None
    """A JSON file for the plans, with versions and date."""


@dataclasses.dataclass(frozen=True)
class Config(Training, Planned):  # --help lists the fields of the last base first
    """Estimate the memory and time of a retrofit on a machine that you do not have."""

    recipe: RecipeName = "paper"
    """Same as in dms-jax retrofit, which has the same options from --policy on; the default
    differs."""


def shape_of(model: str) -> ModelConfig:
    """Returns the shape of a known name, a shipped model, a GGUF file, or a directory."""
    if model in SHAPES:
        return SHAPES[model]
    path = pathlib.Path(find_model(assets.BASES.get(model, model))).expanduser()
    if gguf.is_gguf(path):
        return gguf.read_model(gguf.GgufFiles(path))[0]
    if not path.is_dir():
        raise dms_jax.ConfigError(
            f"--model {model}: no directory or GGUF file, and none of the shapes "
            f"{', '.join(SHAPES)}, nor a model that ships ({', '.join(SHIPPED)})."
        )
    if not (path / "config.json").exists():
        raise dms_jax.ConfigError(f"--model {model}: there is no config.json in it; {HOLDS}.")
    content = read_file("--model", path / "config.json")
    try:
        return ModelConfig.from_hf(json.loads(content))
    except ValueError as error:
        raise dms_jax.ConfigError(f"--model {model}: config.json is not JSON: {error}") from error


def main(config: Config) -> None:
    """Prints a plan for each machine."""
    jax.config.update("jax_platforms", "cpu")
    shape = shape_of(config.model)
    policy, recipe = config.make_policy(), config.make_recipe(shape.max_position_embeddings)
    check_window(policy, recipe)
    plans = [
        plan(
            shape,
            policy,
            recipe=recipe,
            machine=machine,
            model_shards=config.model_shards,
            expert_shards=config.expert_shards,
            sequence_shards=config.sequence_shards,
        )
        for machine in config.machine
    ]
    if config.out is not None:
        make_place("--out", config.out)
        figures = [{"model": config.model, **each.figures()} for each in plans]
        write_json(config.out, provenance(config) | {"device": "none: computed", "plans": figures})
    print("\n\n".join(map(str, plans)), caches(shape, policy, recipe), sep="\n\n")


def caches(shape: ModelConfig, policy: Policy, recipe: Recipe) -> str:
    """Returns the size of a sequence's cache by length, before and after the retrofit."""
    lines = [f"Cache of a sequence, and under {short(policy)} at {recipe.compression_ratio:g}x:"]
    for tokens in LENGTHS:
        if tokens <= shape.max_position_embeddings:
            sizes = cache_sizes(shape, policy, recipe.compression_ratio, tokens)
            lines.append(f"  {tokens:>7,} tokens {sizes[0]:>10} MB {sizes[1]:>10} MB")
    return "\n".join(lines)
