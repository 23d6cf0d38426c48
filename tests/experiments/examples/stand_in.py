"""The part of tunix's interface that rollouts use, for machines without tunix."""

import abc
import dataclasses
import sys
import types
from typing import Any

NAME = "tunix.rl.rollout.base_rollout"


@dataclasses.dataclass
class RolloutConfig:
    max_tokens_to_generate: int = 64
    temperature: float = 0.9
    top_p: float | None = 1.0
    top_k: int | None = None
    seed: Any = None
    max_prompt_length: int = 64
    eos_tokens: list[int] | None = None
    return_logprobs: bool = False


@dataclasses.dataclass
class RolloutOutput:
    text: list[str]
    logits: Any
    tokens: list[Any]
    left_padded_prompt_tokens: Any
    logprobs: Any


class BaseRollout(abc.ABC):
    @abc.abstractmethod
    def __init__(self, **kwargs): ...

    @abc.abstractmethod
    def generate(self, prompts, rollout_config, **kwargs): ...

    @abc.abstractmethod
    def get_per_token_logps(self, prompt_tokens, completion_tokens): ...

    @abc.abstractmethod
    def update_params(self, params, filter_types=None): ...

    @abc.abstractmethod
    def pad_id(self): ...

    @abc.abstractmethod
    def eos_id(self): ...

    @abc.abstractmethod
    def model(self): ...


def modules() -> dict[str, types.ModuleType]:
    """Returns the stand-in modules for tunix."""
    parts = NAME.split(".")
    names = [".".join(parts[: count + 1]) for count in range(len(parts))]
    return {name: types.ModuleType(name) for name in names[:-1]} | {NAME: sys.modules[__name__]}
