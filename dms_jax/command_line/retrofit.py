"""Retrofit a checkpoint with Dynamic Memory Sparsification or Dynamic Memory Compression.

Starts from a named set of options and applies yours on top; the default is custom:

    dms-jax retrofit stories260k --compression-ratio 4 --out runs/small
    dms-jax retrofit --model path/to/model --data train.jsonl --out runs/mine
    dms-jax retrofit custom --help
    dms-jax retrofit self-taught --model m.gguf --prompts questions.jsonl

The same command resumes from the latest checkpoint. With several processes, on several hosts, start
each with the same command (experiments/launch of a checkout). The result, in out/model, is a
Hugging Face directory whose config.json names the policy, for --model of every command and
`dms_jax.load`. With --adapter-only it is the adapter alone, for
--adapter and `load(model, adapter=...)`.

self-taught trains on the model's own answers: it samples and filters them, trains, measures the
exports, and writes a page into out/README.md. Each stage leaves files, and the same command resumes
after a stop.
"""

import contextlib
import dataclasses
import pathlib

import dms_jax
from dms_jax import assets, processes
from dms_jax.command_line.options import find_both, read_options
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.retrofitting import Config, check_window
from dms_jax.command_line.self_taught import settings
from dms_jax.command_line.self_taught.settings import SelfTaught
from dms_jax.command_line.self_taught.stages import self_taught
from dms_jax.training.tensorboard import TensorBoard

INTERRUPTED = "Interrupted. Run the same command to resume."

PRESETS: dict[str, tuple[str, Config | SelfTaught]] = {
    "custom": (
        "Any checkpoint: give --model and --data.",
        Config(model="", data=(), out=pathlib.Path("runs/retrofit")),
    ),
    "stories260k": (
        "The model and the text that ship with the library, in a minute or two on a laptop.",
        Config(
            model="stories260k",
            data=(assets.path("tinystories") / "train.txt",),
            out=pathlib.Path("runs/stories260k"),
            recipe="quickstart",
        ),
    ),
    "stories260k-dmc": (
        "The same model and text with Dynamic Memory Compression, in a few minutes on a laptop.",
        Config(
            model="stories260k",
            data=(assets.path("tinystories") / "train.txt",),
            out=pathlib.Path("runs/stories260k-dmc"),
            recipe="dmc_quickstart",
        ),
    ),
    "qwen3-8b": (
        "As NVIDIA's released code: adapters on a frozen Qwen3-8B, 8 sequences of 32768 tokens a "
        "step, 8 devices. Needs a JSON lines file of conversations (--data).",
        Config(
            model="Qwen/Qwen3-8B",
            data=(),
            out=pathlib.Path("runs/qwen3-8b-dms8"),
            data_shards=8,
        ),
    ),
    "llama-3.2-1b": (
        "As the paper: all weights of Llama 3.2 1B Instruct, a borrowed neuron, window 16.",
        Config(
            model="meta-llama/Llama-3.2-1B-Instruct",
            data=(),
            out=pathlib.Path("runs/llama-3.2-1b-dms4"),
            recipe="paper",
            paper_model="llama-3.2-1b",
        ),
    ),
    "llama-2-7b-dmc": (
        "As the DMC paper: all weights of Llama 2 7B, language modelling, 4M tokens a step.",
        Config(
            model="meta-llama/Llama-2-7b-hf",
            data=(),
            out=pathlib.Path("runs/llama-2-7b-dmc2"),
            recipe="dmc_paper",
            paper_model="llama-2-7b",
        ),
    ),
    **settings.PRESETS,
}


def main(config: Config | SelfTaught) -> None:
    """Runs a retrofit."""
    if isinstance(config, SelfTaught):
        self_taught(config)
        return
    if not config.model or not config.data:
        raise dms_jax.ConfigError(
            "give --model and --data, or a preset that has both: dms-jax retrofit stories260k."
        )
    processes.connect(config.coordinator, config.processes, config.process)
    say = print if processes.is_first() else (lambda _: None)
    mesh = config.make_mesh()
    processes.check_mesh(mesh)
    # Check the options before loading anything; the model's positions are not known yet.
    asked = dataclasses.replace(config, steps=None, tokens=None).make_recipe()
    policy = config.make_policy()
    make_folder("--out", config.out)
    with contextlib.ExitStack() as closing:
        data = config.make_data()
        path, adapter = find_both(config.model, config.adapter)
        base = dms_jax.load(path, mesh=mesh, adapter=adapter, for_training=True)
        recipe = config.make_recipe(base.config.max_position_embeddings)
        if recipe.sequence_length < asked.sequence_length:
            say(
                f"The sequences of {asked.name}, {asked.sequence_length} tokens, are cut to the "
                f"model's {recipe.sequence_length} positions (--sequence-length), in as many steps "
                "unless --steps or --tokens say otherwise."
            )
        check_window(policy, recipe)
        if config.template:
            base = base.with_template(**read_options(config.template, "--template"))
        board = None
        if config.tensorboard and processes.is_first():
            board = closing.enter_context(
                contextlib.closing(TensorBoard(config.out / "tensorboard"))
            )
        dms_jax.retrofit(
            base,
            policy,
            recipe=recipe,
            data=data,
            out=config.out,
            seed=config.seed,
            mesh=mesh,
            checkpoint_every=config.checkpoint_every,
            checkpoint_minutes=config.checkpoint_minutes,
            keep_checkpoints=config.keep_checkpoints,
            restart_from=config.restart_from,
            adapter_only=config.adapter_only,
            on_step=board,
        )
    what = "adapter" if config.adapter_only else "model"
    say(f"The {what} is in {config.out / 'model'}; every step is in {config.out / 'log.jsonl'}")
