"""Rollouts of tunix's reinforcement learning from a small cache.

    import functools, dms_jax
    from experiments.examples.tunix_rollout import Actor, DmsJaxRollout, Tokenizer

    model = dms_jax.load("path/to/model", adapter="path/to/dms-adapter")
    RLCluster(
        actor=Actor(model),
        tokenizer=Tokenizer(model),
        cluster_config=ClusterConfig(
            rollout_engine=functools.partial(DmsJaxRollout, model=model, num_lanes=256), ...
        ),
    )

The trainer calls `Actor`, whose pass over whole sequences evicts as the engine's cache does. So the
log-probabilities of a rollout equal the trainer's up to rounding, and the policy gradient is that
of the model as it generates. `experiments.examples.grpo` trains one.

Needs google-tunix 0.1.7, which pins older releases of two dependencies than dms_jax; it runs with
newer ones: `uv pip install google-tunix --override experiments/examples/tunix_overrides.txt`.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int
from tunix.rl.rollout.base_rollout import (  # pyright: ignore[reportMissingImports]
    BaseRollout,
    RolloutConfig,
    RolloutOutput,
)

import dms_jax
from dms_jax.cache.accounting import Usage
from dms_jax.generation.api import total_usage
from dms_jax.generation.requests import encode_prompt


class Actor(nnx.Module):
    """A model as tunix calls one, under the hard decisions of a policy.

    Args:
      model: from `dms_jax.load` or `retrofit`; its parameters are shared.
      policy: the cache policy; None for the one that the checkpoint declares.

    Raises:
      ConfigError: the policy does not fit the model, or learns from attention as it decodes (TOVA,
        H2O, ...): a pass over whole sequences, which the trainer differentiates, cannot follow it.
    """

    def __init__(self, model: dms_jax.LanguageModel, policy: Any = None):
        policy = model.resolve_policy(policy)
        if policy.parallel != "always":
            raise dms_jax.ConfigError(
                f"{policy.name} decides from attention weights, token by token, and a trainer "
                "reads whole sequences. Train under one that does not: DMS, DMC, StreamingLLM or "
                "Vanilla."
            )
        self.transformer = model.transformer
        self.policy = nnx.static(policy)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Array | None = None,
        cache: None = None,
        attention_mask: Array | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
    ) -> tuple[Float[Array, "B T V"], None]:
        """Returns logits and no cache.

        Args:
          tokens: padded on both sides.
          positions, cache, attention_mask: what tunix passes to models that need it.
          segment_ids: 0 for padding, which is a document of its own: positions and decisions of
            the sequence start after it. Tunix marks every token with the padding id; one that the
            model sampled inside its answer is part of the answer here.
        """
        if segment_ids is not None:
            ahead = jax.lax.cummax(segment_ids, axis=1, reverse=True)
            segment_ids = jnp.where(ahead > 0, jax.lax.cummax(segment_ids, axis=1), 0)
        passed = self.transformer(tokens, self.policy, segment_ids=segment_ids)
        return self.transformer.unembed(passed.hidden), None


class Tokenizer:
    """A model's tokenizer as tunix calls one.

    Args:
      model: the model.
      pad_id: a token that is in no text; the model's own unless given, else 0.
    """

    def __init__(self, model: dms_jax.LanguageModel, pad_id: int | None = None):
        own = model.generation.pad_token_id
        self._model, self._pad_id = model, pad_id if pad_id is not None else own or 0

    def encode(self, text: str, **_: Any) -> list[int]:
        """Returns the token ids of a text."""
        return encode_prompt(self._model, text)

    def decode(self, ids: Any, **_: Any) -> str:
        """Returns the text of token ids."""
        return self._model.tokenizer.decode(list(map(int, ids)))

    def bos_id(self) -> int | None:
        """Returns the token that begins a sequence."""
        return self._model.generation.bos_token_id

    def eos_id(self) -> int:
        """Returns the last of the tokens that end an answer; the pad token if there is none."""
        return (*(self._pad_id,), *self._model.generation.eos_token_ids)[-1]

    def pad_id(self) -> int:
        """Returns the token of padding."""
        return self._pad_id


class DmsJaxRollout(BaseRollout):
    """A rollout worker that generates with `dms_jax.Engine` under the actor's cache policy.

    It has its own copy of the parameters, which `update_params` replaces by the trainer's
    (`Engine.update`) without compiling anything.

    Args:
      rollout_actor, tokenizer, mesh, rollout_config: given by tunix's RLCluster. The mesh has one
        device, or the axes of `dms_jax.make_mesh`.
      model: the model of the actor: its tokenizer, chat template and end tokens.
      num_lanes, memory, chunk: see `dms_jax.generation.EngineOptions`.

    Attributes:
      usage: the use of the cache by the last call of `generate`, over all its answers.
    """

    def __init__(
        self,
        rollout_actor: Actor,
        tokenizer: Any,
        mesh: jax.sharding.Mesh,
        rollout_config: RolloutConfig,
        *,
        model: dms_jax.LanguageModel,
        num_lanes: int = 64,
        memory: float | None = None,
        chunk: int = 32,
    ):
        if ends := rollout_config.eos_tokens:
            generation = dataclasses.replace(model.generation, eos_token_ids=tuple(ends))
            model = dataclasses.replace(model, generation=generation)
        self._ends = ends
        # A copy of the module, not of its arrays.
        self._actor: Actor = nnx.merge(*nnx.split(rollout_actor))
        own = dataclasses.replace(
            model, transformer=self._actor.transformer, mesh=mesh if mesh.size > 1 else None
        )
        if mesh.size > 1:
            own = own.place()
        else:
            place = jax.sharding.SingleDeviceSharding(mesh.devices.item())
            placed = jax.tree.map(lambda x: jax.device_put(x, place), own.transformer)
            own = dataclasses.replace(own, transformer=placed)
        self._actor.transformer = own.transformer
        self._engine = dms_jax.Engine(
            own,
            self._actor.policy,
            num_lanes=num_lanes,
            max_tokens=rollout_config.max_prompt_length + rollout_config.max_tokens_to_generate,
            memory=memory,
            chunk=chunk,
        )
        self._tokenizer, self._temperature = tokenizer, rollout_config.temperature
        self._calls = 0
        self.usage: Usage | None = None

    def generate(
        self, prompts: list[Any], rollout_config: RolloutConfig, **_: Any
    ) -> RolloutOutput:
        """Answers prompts; equal prompts are prefilled once and sampled independently.

        The seed of a call is `rollout_config.seed` (0 if None) plus the number of earlier calls.

        Args:
          prompts: texts, chats or token ids.
          rollout_config: temperature, top_p, top_k, seed, the longest prompt and answer.

        Raises:
          DataError: a prompt is longer than `max_prompt_length`; it is not cut silently.
          ConfigError: end tokens differ from those at construction; or log-probabilities are wanted
            at a temperature other than 0 and 1: the engine returns the model's own, and tunix
            expects them at that temperature.
        """
        config, longest = rollout_config, rollout_config.max_prompt_length
        if config.eos_tokens != self._ends:
            raise dms_jax.ConfigError(
                f"eos_tokens={config.eos_tokens} is not {self._ends}, with which this rollout was "
                "made: its programs end at those. Use the same in every mode."
            )
        if config.return_logprobs and config.temperature not in (0, 1):
            raise dms_jax.ConfigError(
                f"return_logprobs=True gives log-probabilities at temperature 1, and temperature="
                f"{config.temperature} is another. Use temperature=1, or leave them out: "
                "get_per_token_logps computes them at any."
            )
        encoded = [
            encode_prompt(self._engine.model, prompt, name=f"Prompt {index}")
            for index, prompt in enumerate(prompts)
        ]
        for index, tokens in enumerate(encoded):
            if len(tokens) > longest:
                raise dms_jax.DataError(
                    f"Prompt {index} has {len(tokens)} tokens, more than max_prompt_length="
                    f"{longest}. Raise that, or leave the prompt out."
                )
        seed = 0 if config.seed is None else int(np.asarray(config.seed).flat[-1])
        sampling = dms_jax.Sampling(
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=max(config.top_k or 0, 0),
            max_new_tokens=config.max_tokens_to_generate,
            seed=(seed + self._calls) % 2**32,
            logprobs=config.return_logprobs,
        )
        self._calls += 1
        answers = self._engine.generate(encoded, sampling=sampling)
        self.usage = total_usage([each.usage for each in answers])
        padded = np.full((len(encoded), longest), self.pad_id(), np.int32)
        for row, tokens in zip(padded, encoded, strict=True):
            row[longest - len(tokens) :] = tokens
        logprobs = [np.asarray(each.logprobs, np.float32) for each in answers]
        return RolloutOutput(
            text=[each.text for each in answers],
            logits=None,  # type: ignore  # read by nobody; of a vocabulary they would be large
            tokens=[np.asarray(each.tokens, np.int32) for each in answers],
            left_padded_prompt_tokens=padded,
            logprobs=logprobs if config.return_logprobs else None,
        )

    def get_per_token_logps(
        self, prompt_tokens: Int[Array, "B P"], completion_tokens: Int[Array, "B C"]
    ) -> Float[Array, "B C"]:
        """Returns the log-probability of each token of answers, as the trainer computes it.

        Args:
          prompt_tokens: padded on the left.
          completion_tokens: padded on the right, where the results mean nothing.
        """
        return token_logps(
            self._actor, prompt_tokens, completion_tokens, self.pad_id(), self._temperature or 1.0
        )

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """Replaces the parameters of the same names, cast to the rollout's dtype.

        Raises:
          ConfigError: there is no such parameter, or it has another shape.
        """
        own = dict(nnx.to_flat_state(nnx.state(self._actor)))
        given = dict(nnx.to_flat_state(params))
        if unknown := [path for path in given if path not in own]:
            raise dms_jax.ConfigError(
                f"update_params: {'.'.join(map(str, unknown[0]))} is not one of its parameters. "
                "Its actor and the trainer's are one `Actor`."
            )
        rounded = {
            path[1:]: param.replace(param[...].astype(own[path].get_value().dtype))
            for path, param in given.items()  # ("transformer", "layers", ...)
        }
        self._engine.update(nnx.from_flat_state(list(rounded.items())))
        self._actor.transformer = self._engine.model.transformer

    def pad_id(self) -> int:
        return self._tokenizer.pad_id()

    def eos_id(self) -> int:
        return self._tokenizer.eos_id()

    def model(self) -> Actor:
        return self._actor


@jax.jit
def token_logps(
    actor: Actor,
    prompts: Int[Array, "B P"],
    completions: Int[Array, "B C"],
    pad_id: int,
    temperature: float,
) -> Float[Array, "B C"]:
    """Returns the log-probabilities of padded answers; see `get_per_token_logps`."""
    tokens = jnp.concatenate([prompts, completions], axis=1)
    logits, _ = actor(tokens, segment_ids=(tokens != pad_id).astype(jnp.int32))
    logits = logits[:, prompts.shape[1] - 1 : -1] / temperature
    chosen = jnp.take_along_axis(logits, completions[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(logits, axis=-1)
