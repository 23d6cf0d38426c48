"""The options that `dms-jax generate`, `chat` and `serve` share."""

import dataclasses
import inspect
from typing import Any, Literal

import dms_jax
from dms_jax.checks import Positive, Seed, check
from dms_jax.command_line.options import (
    SHIPPED,
    Devices,
    load_model,
    on_checkpoint,
    read_options,
    read_policy,
)
from dms_jax.generation import EngineOptions
from dms_jax.policies import Policy

SAMPLING = dms_jax.Sampling()
CALL = {
    name: parameter.default
    for name, parameter in inspect.signature(dms_jax.generate).parameters.items()
}


@dataclasses.dataclass(frozen=True)
class Generating(Devices):
    """A model, its cache, and how tokens are drawn."""

    model: str = SHIPPED[0]
    """A Hugging Face directory, a GGUF file, a hub id (owner/name), or a model that ships:
    stories260k, reasoner-11m, reasoner-11m-dms (the same with its adapter)."""
    adapter: str | None = None
    """An adapter of the model: a directory, or one that ships (smollm2-135m-instruct-dms)."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights and the cache; by default that of the files."""
    policy: str | None = None
    """Name of a cache policy from the list above; by default the one that the checkpoint
    declares."""
    options: tuple[str, ...] = ()
    """Options of the policy, as name=value (window=256) or as one JSON object."""
    temperature: float = SAMPLING.temperature
    """0 takes the most likely token; below 1, likely tokens are favoured."""
    top_k: int = SAMPLING.top_k
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: float = SAMPLING.top_p
    """Keep the most likely tokens until their probability reaches this."""
    min_p: float = SAMPLING.min_p
    """Keep tokens at least this many times as likely as the most likely one."""
    max_new_tokens: int = SAMPLING.max_new_tokens
    """Most new tokens of an answer; the model's positions may end it earlier."""
    stop: tuple[str, ...] = ()
    """Strings that end an answer; the answer stops before them."""
    seed: int = 0
    """Seed of the sampling: the same seed gives the same text."""
    memory_gb: float | None = None
    """Gigabytes for the cache; by default as much as the sequences may need, up to the free
    memory."""
    page_size: int = CALL["page_size"]
    """Tokens of a page of the cache; 16 for Quest as published."""
    chunk: int = CALL["chunk"]
    """Decode steps between two updates of the text."""
    kv_dtype: Literal["float8_e4m3"] | None = CALL["kv_dtype"]
    """Type of the cache, if not that of the weights: float8_e4m3."""
    template: tuple[str, ...] = ()
    """Variables of the chat template, as name=value (enable_thinking=false for Qwen3)."""

    @property
    def own_adapter(self) -> str | None:
        """The adapter to load with the model."""
        return self.adapter

    def load(self) -> dms_jax.LanguageModel:
        """The model."""
        variables = read_options(self.template, "--template")
        model = load_model(self.model, self.own_adapter, self.dtype, self.make_mesh())
        return model.with_template(**variables) if variables else model

    def make_policy(self, model: dms_jax.LanguageModel | None = None) -> Policy | None:
        """Returns the named policy; given a model, missing options are those that it declares."""
        policy = read_policy(self.policy, self.options)
        if model is None:
            return policy
        return on_checkpoint(policy, read_options(self.options), model.policy)

    def make_sampling(self, **more: Any) -> dms_jax.Sampling:
        """Returns the sampling options."""
        names = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop", "seed")
        check("--seed", self.seed, Seed)  # the library also takes a seed for each prompt
        return dms_jax.Sampling(**{name: getattr(self, name) for name in names} | more)

    def cache(self) -> dict[str, Any]:
        """Returns the cache's keyword arguments of `generate`, `Engine` and `Service`.

        Raises:
          ConfigError: an argument is malformed; checked before a model is loaded.
        """
        gigabytes = check("--memory-gb", self.memory_gb, Positive | None)
        memory = None if gigabytes is None else gigabytes * 1e9
        cache: dict[str, Any] = dict(
            memory=memory, page_size=self.page_size, chunk=self.chunk, kv_dtype=self.kv_dtype
        )
        EngineOptions(num_lanes=1, max_tokens=None, **cache)
        return cache
