"""Retrofit a checkpoint with Dynamic Memory Sparsification or Dynamic Memory Compression.

Starts from a named set of options, each of which can be changed:

    python -m experiments.retrofit stories260k --compression-ratio 4 --out runs/small
    python -m experiments.retrofit custom --model path/to/model --data train.jsonl --out runs/mine
    python -m experiments.retrofit custom --help
    python -m experiments.retrofit self-taught --model m.gguf --prompts questions.jsonl --out runs/x

Started again with the same options it goes on from the latest checkpoint. The result, in out/model,
is a Hugging Face directory whose config.json names the policy: `dms_jax.load` runs it as it is.
With --adapter-only it is what was trained beside frozen weights, for `load(model, adapter=...)`.

self-taught trains on the model's own answers: it samples and filters them, trains, measures what it
exported, and writes a page into out/README.md; each stage leaves files, and the same command goes
on after a stop.
"""

import sys

import dms_jax
from dms_jax.command_line.reports import make_folder
from dms_jax.command_line.running import run
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
    make_folder("--out", config.out)
    mesh = None
    if config.data_shards * config.model_shards > 1:
        mesh = dms_jax.make_mesh(config.data_shards, config.model_shards)
    recipe, policy = config.make_recipe(), config.make_policy()
    print(
        f"{recipe.name}: {recipe.total_steps(policy)} steps to ratio "
        f"{recipe.compression_ratio:g}, {policy}"
    )
    dms_jax.retrofit(
        dms_jax.load(config.model, mesh=mesh, adapter=config.adapter, for_training=True),
        policy,
        recipe=recipe,
        data=config.make_data(),
        out=config.out,
        seed=config.seed,
        mesh=mesh,
        checkpoint_every=config.checkpoint_every,
        adapter_only=config.adapter_only,
    )
    what = "adapter" if config.adapter_only else "model"
    print(f"The {what} is in {config.out / 'model'}; every step is in {config.out / 'log.jsonl'}")


if __name__ == "__main__":
    again = "Interrupted. Run the same command to go on."
    sys.exit(
        run(
            main, {**PRESETS, **self_taught_configs.PRESETS}, description=__doc__, interrupted=again
        )
    )
