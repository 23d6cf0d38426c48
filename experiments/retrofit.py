"""Retrofit a checkpoint with Dynamic Memory Sparsification or Dynamic Memory Compression.

Starts from a named set of options, each of which can be changed:

    python -m experiments.retrofit stories260k --compression-ratio 4 --out runs/small
    python -m experiments.retrofit custom --model path/to/model --data train.jsonl --out runs/mine
    python -m experiments.retrofit custom --help

Started again with the same options it goes on from the latest checkpoint. The result, in out/model,
is a Hugging Face directory whose config.json names the policy: `dms_jax.load` runs it as it is.
"""

import sys

import tyro

import dms_jax
from experiments.configs.retrofit import PRESETS, Config


def main(config: Config) -> int:
    """Runs the retrofit; returns the exit status."""
    try:
        if not config.model or not config.data:
            raise dms_jax.ConfigError("give --model and --data")
        mesh = None
        if config.data_shards * config.model_shards > 1:
            mesh = dms_jax.make_mesh(config.data_shards, config.model_shards)
        recipe, policy = config.make_recipe(), config.make_policy()
        print(
            f"{recipe.name}: {recipe.total_steps(policy)} steps to ratio "
            f"{recipe.compression_ratio:g}, {policy}"
        )
        dms_jax.retrofit(
            dms_jax.load(config.model, mesh=mesh),
            policy,
            recipe=recipe,
            data=list(config.data),
            out=config.out,
            seed=config.seed,
            mesh=mesh,
            checkpoint_every=config.checkpoint_every,
        )
    except dms_jax.DmsJaxError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt as interrupt:
        print(f"Interrupted ({interrupt}). Run the same command to go on.", file=sys.stderr)
        return 130
    print(f"The model is in {config.out / 'model'}; every step is in {config.out / 'log.jsonl'}")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.extras.overridable_config_cli(PRESETS, description=__doc__)))
