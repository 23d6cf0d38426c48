"""Options of the cache and the engine during an evaluation."""

import dataclasses
import math
from typing import Annotated, Any

from dms_jax.checks import CountOnDevice, Options, Positive, check
from dms_jax.generation import Engine
from dms_jax.generation.memory import spare_bytes
from dms_jax.generation.prefill import SATURATING
from dms_jax.model.language_model import LanguageModel
from dms_jax.policies import Policy

# If a policy runs prompts token by token, many sequences take as long as one. So as many run
# together as fit into this many bytes of activations, or into what the pool leaves free on a small
# device.
_ACTIVATION_BYTES = 8e9


@dataclasses.dataclass(frozen=True)
class Serving(Options):
    """Options of the cache and the engine.

    Attributes:
      lanes: sequences in the cache at a time. It takes more than a thousand to keep a large GPU
        busy.
      memory: bytes for the cache; None for as much as the lanes may need, within the free memory.
      chunk: decode steps of a compiled program; finished requests leave their lanes after it.
      page_size: slots per page; 16 for Quest as published.
      prefill_chunk: prompt tokens of a sequence per compiled program.
      kv_dtype: "float8_e4m3" for a cache of keys and values in 8 bits; None for the model's type.
    """

    lanes: CountOnDevice = 1024
    memory: Annotated[Positive, "give bytes"] | None = None
    chunk: CountOnDevice = 32
    page_size: CountOnDevice = 64
    prefill_chunk: CountOnDevice = 512
    kv_dtype: str | None = None

    @classmethod
    def given(cls, what: str, serving: "Serving | None", **default: Any) -> "Serving":
        """The options given to a call, or the default ones.

        Raises:
          ConfigError: the argument is no `Serving`.
        """
        return cls(**default) if serving is None else check(f"{what}: serving", serving, cls)

    def engine(
        self, model: LanguageModel, policy: Policy, *, sequences: int, max_tokens: int
    ) -> Engine:
        """An engine for sequences of at most `max_tokens`, with one compiled width."""
        return Engine(
            model,
            policy,
            num_lanes=min(self.lanes, sequences),
            memory=self.memory,
            max_tokens=max_tokens,
            page_size=self.page_size,
            chunk=self.chunk,
            prefill_chunk=self.prefill_chunk,
            prefill_tokens=_prefill_tokens(model, policy),
            table_width=-(-(max_tokens + self.chunk) // self.page_size),
            kv_dtype=self.kv_dtype,
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns the options as JSON data."""
        return dataclasses.asdict(self)


def _prefill_tokens(model: LanguageModel, policy: Policy) -> int:
    """The most prompt tokens of all sequences together in one compiled program, a power of two."""
    bytes_a_token = 3 * model.config.active_width * model.dtype.itemsize
    most = min(_ACTIVATION_BYTES, spare_bytes(model)) / bytes_a_token
    tokens = 1 << max(0, int(math.log2(max(most, 1))))
    return min(tokens, SATURATING) if policy.parallel != "never" else tokens
