"""Train a small model to write dialogue with tunix's GRPO, on rollouts from a small cache.

    python -m experiments.examples.grpo --out runs/grpo.json

The reward is 1 for four quotation marks, a share for fewer. Rollouts and the trainer use one cache
policy (`experiments.examples.tunix_rollout`); a model without a retrofit evicts by untrained
neurons and learns to live with it. Reports for each step the mean reward, the compression ratio of
the rollout's cache and the programs that the rollout compiled; at the end how far the
log-probabilities of a rollout are from the trainer's, and from those of a pass without evictions.
Needs google-tunix: `experiments/examples/tunix_rollout.py` says how to install it.
"""

import dataclasses
import functools
import pathlib
import sys
import time
from importlib import metadata
from typing import Any

import jax
import numpy as np
import optax

import dms_jax
from dms_jax import compilation
from dms_jax.command_line.options import find_model
from dms_jax.command_line.reports import make_place, provenance, write_json
from dms_jax.command_line.running import run
from dms_jax.json_text import json_text
from experiments.benchmarks.settings import check_numbers

BEGINNINGS = ("Once upon a time", "One day, a girl named Lily", "Tom and Ben", "The little dog")


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a small model with GRPO on rollouts from a small cache."""

    model: str = "stories260k"
    """Model to train, as in `dms-jax generate`; its own policy, if it declares one, is used."""
    window: int = 16
    """Window of DMS, for a model that declares no policy."""
    steps: int = 20
    """Steps of GRPO."""
    generations: int = 8
    """Answers to each of four prompts."""
    new_tokens: int = 96
    """Longest answer."""
    learning_rate: float = 3e-4
    """Learning rate of Adam."""
    out: pathlib.Path | None = pathlib.Path("runs/grpo.json")
    """File of the figures."""

    def __post_init__(self):
        check_numbers(self)


def reward(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """Returns the share of four quotation marks that each story has."""
    return [min(text.count('"'), 4) / 4 for text in completions]


def main(config: Config) -> None:
    """Trains, and writes the figures."""
    if config.out is not None:
        make_place("--out", config.out)
    try:
        from tunix.rl import rl_cluster  # pyright: ignore[reportMissingImports]
        from tunix.rl.grpo.grpo_learner import (  # pyright: ignore[reportMissingImports]
            GRPOConfig,
            GRPOLearner,
        )
        from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
            RolloutConfig,
        )

        from experiments.examples.tunix_rollout import (
            Actor,
            DmsJaxRollout,
            Tokenizer,
            token_logps,
        )
    except ImportError as error:
        raise dms_jax.ConfigError(
            f"This example needs google-tunix ({error}). Install it: uv pip install google-tunix "
            "--override experiments/examples/tunix_overrides.txt"
        ) from error

    class WatchedRollout(DmsJaxRollout):
        compiled = 0

        def generate(self, *given: Any, **more: Any) -> Any:
            with compilation.watched() as made:
                output = super().generate(*given, **more)
            self.compiled = made.compiled + made.read
            return output

    model = dms_jax.load(find_model(config.model), untrained=True)
    policy = dms_jax.DMS(window=config.window, alpha_offset=0.0)
    if model.policy != dms_jax.Vanilla():
        policy = model.policy
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("fsdp",))
    rollout = RolloutConfig(
        max_tokens_to_generate=config.new_tokens,
        max_prompt_length=32,
        temperature=1.0,
        return_logprobs=True,
    )
    chains = len(BEGINNINGS) * config.generations
    cluster = rl_cluster.RLCluster(
        actor=Actor(model, policy),
        tokenizer=Tokenizer(model),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh=dict.fromkeys(rl_cluster.Role, mesh),
            rollout_engine=functools.partial(WatchedRollout, model=model, num_lanes=chains),
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(config.learning_rate),
                eval_every_n_steps=config.steps + 1,
                max_steps=config.steps,
            ),
            rollout_config=rollout,
        ),
    )
    steps: list[dict[str, float]] = []

    def note(rewards: np.ndarray, **_: Any) -> dict[str, Any]:
        worker = cluster.rollout
        steps.append(
            dict(
                reward=float(np.mean(rewards)),
                compression_ratio=worker.usage.compression_ratio,
                compiled=worker.compiled,
                seconds=time.monotonic() - start,
            )
        )
        print(json_text(steps[-1]))
        return {}

    grpo = GRPOConfig(num_generations=config.generations, beta=0.0)
    learner = GRPOLearner(cluster, grpo, reward_fns=reward, metric_fns=[note])
    start = time.monotonic()
    learner.train([{"prompts": np.asarray(BEGINNINGS)}] * config.steps)
    answers = cluster.rollout.generate(list(BEGINNINGS), rollout)
    assert answers.logprobs is not None
    pad = cluster.rollout.pad_id()
    padded = np.full((len(BEGINNINGS), config.new_tokens), pad, np.int32)
    for row, answer in zip(padded, answers.tokens, strict=True):
        row[: len(answer)] = answer
    tokens = [jax.numpy.asarray(x) for x in (answers.left_padded_prompt_tokens, padded)]
    trained = dataclasses.replace(model, transformer=cluster.rollout.model().transformer)
    dense = Actor(trained, dataclasses.replace(policy, window=model.config.max_position_embeddings))

    def apart(scored: jax.Array) -> float:
        """Returns the largest difference to the log-probabilities of the rollout."""
        rows = zip(answers.logprobs, np.asarray(scored), strict=True)
        return max(float(np.abs(own - row[: len(own)]).max()) for own, row in rows)

    figures = provenance(config) | dict(
        tunix=metadata.version("google-tunix"),
        policy=str(policy),
        logprobs_apart=apart(
            cluster.get_actor_per_token_logps(*tokens, pad, cluster.rollout.eos_id())
        ),
        logprobs_apart_without_evictions=apart(token_logps(dense, *tokens, pad, 1.0)),
        steps=steps,
    )
    if config.out is not None:
        write_json(config.out, figures)
    print(json_text({key: value for key, value in figures.items() if key.startswith("logprobs")}))


if __name__ == "__main__":
    sys.exit(run(main, Config, description=__doc__))
