"""Retrofit a checkpoint with Dynamic Memory Sparsification or Dynamic Memory Compression.

Starts from a named set of options, each of which can be changed:

    python -m experiments.retrofit stories260k --compression-ratio 4 --out runs/small
    python -m experiments.retrofit custom --model path/to/model --data train.jsonl --out runs/mine
    python -m experiments.retrofit custom --help

Started again with the same options it goes on from the latest checkpoint. The result, in out/model,
is a Hugging Face directory whose config.json names the policy: `dms_jax.load` runs it as it is.
"""

import sys

import dms_jax
from experiments.configs.retrofit import PRESETS, Config
from experiments.shared.command_line import run
from experiments.shared.reports import make_folder


def main(config: Config) -> None:
    """Runs the retrofit."""
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
        dms_jax.load(config.model, mesh=mesh, adapter=config.adapter),
        policy,
        recipe=recipe,
        data=list(config.data),
        out=config.out,
        seed=config.seed,
        mesh=mesh,
        checkpoint_every=config.checkpoint_every,
    )
    print(f"The model is in {config.out / 'model'}; every step is in {config.out / 'log.jsonl'}")


if __name__ == "__main__":
    again = "Interrupted. Run the same command to go on."
    sys.exit(run(main, PRESETS, description=__doc__, interrupted=again))
