"""Retrofit a checkpoint with Dynamic Memory Sparsification or Dynamic Memory Compression.

Starts from a named set of options, each of which can be changed:

    python -m experiments.retrofit stories260k --compression-ratio 4 --out runs/small
    python -m experiments.retrofit custom --model path/to/model --data train.jsonl --out runs/mine
    python -m experiments.retrofit custom --help
    python -m experiments.retrofit self-taught --model m.gguf --prompts questions.jsonl --out runs/x

Started again with the same options it goes on from the latest checkpoint. Of several processes, on
several hosts, each is started with the same command (launch/README.md). The result, in out/model,
is a Hugging Face directory whose config.json names the policy: `dms_jax.load` runs it as it is.
With --adapter-only it is what was trained beside frozen weights, for `load(model, adapter=...)`.

self-taught trains on the model's own answers: it samples and filters them, trains, measures what it
exported, and writes a page into out/README.md; each stage leaves files, and the same command goes
on after a stop.
"""

import sys

import dms_jax
from dms_jax import processes
from dms_jax.command_line.options import find_model
from dms_jax.command_line.ratio_pictures import RatioPictures
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import run
from dms_jax.training.tensorboard import TensorBoard
from experiments.configs import self_taught as self_taught_configs
from experiments.configs.retrofit import PRESETS, Config
from experiments.configs.self_taught import SelfTaught
from experiments.self_taught.running import self_taught


def main(config: Config | SelfTaught) -> None:
    """Runs the retrofit."""
    if isinstance(config, SelfTaught):
        self_taught(config)
        return
    if not config.model or not config.data:
        raise dms_jax.ConfigError("give --model and --data")
    processes.connect(config.coordinator, config.processes, config.process)
    say = print if processes.is_first() else (lambda _: None)
    make_folder("--out", config.out)
    mesh = config.make_mesh()
    recipe, policy = config.make_recipe(), config.make_policy()
    data = config.make_data()
    board = None
    if config.tensorboard and processes.is_first():
        board = TensorBoard(config.out / "tensorboard")
    pictures = None
    if config.pictures:
        pictures = RatioPictures(config.out / "ratios", data, recipe.sequence_length)
    model = dms_jax.retrofit(
        dms_jax.load(
            find_model(config.model), mesh=mesh, adapter=config.adapter, for_training=True
        ),
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
        on_snapshot=pictures,
    )
    if pictures is not None:
        pictures(float(recipe.compression_ratio), model)
    what = "adapter" if config.adapter_only else "model"
    say(f"The {what} is in {config.out / 'model'}; every step is in {config.out / 'log.jsonl'}")


if __name__ == "__main__":
    again = "Interrupted. Run the same command to go on."
    sys.exit(
        run(
            main, {**PRESETS, **self_taught_configs.PRESETS}, description=__doc__, interrupted=again
        )
    )
