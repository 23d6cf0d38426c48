"""Latency model of a decode step, and the share of the cache in it (DMS paper, appendix H).

With B sequences of S live tokens each, two operations per multiply-accumulate and two bytes per
number (equations 2 and 3; there d = E = H D, d_ff = F, d_kv = K D, n = L, L = S):

    operations  L B (6 E F + 4 E H D + 4 E K D + 4 H D S) + 2 B E V
    bytes       L (6 E F + 4 E H D + 4 E K D + 4 B S K D) + 2 E V
    seconds     max(operations / peak, bytes / bandwidth)                            (equation 6)
    share       of the cache's 4 L B S K D bytes, at that bandwidth, in those seconds  (figure 6)

Of the reads only the cache grows with the batch, so compression by a ratio CR, which leaves S =
tokens / CR live, gains more with more and longer sequences.

Two slips of the appendix are not repeated. Its equation 3 has 4 d d_ff where the key and value
projections are read, which must be 4 d d_kv: equation 5 and the 7.5e9 parameters of its check
follow from the latter (Llama 3.1 8B: 1.50e10 bytes; 2.20e10 as printed). Its equation 4 has
1.45e9 B operations for Llama 3.1 8B, where equation 2 gives 1.50e10 B.
"""

import dataclasses

from dms_jax.checks import Count, NotNegative, Number, Ratio, check, require
from dms_jax.config import ModelConfig
from dms_jax.devices import Device
from dms_jax.errors import ConfigError

BYTES = 2  # a number in bfloat16


@dataclasses.dataclass(frozen=True)
class Step:
    """One decode step of a model on a device.

    Attributes:
      operations: floating-point operations, two per multiply-accumulate.
      weight_bytes: weights read from memory, independent of the batch.
      cache_bytes: keys and values read from memory.
      compute_seconds, read_seconds: time of only the operations, and of only the reads.
    """

    operations: float
    weight_bytes: float
    cache_bytes: float
    compute_seconds: float
    read_seconds: float

    @property
    def bytes(self) -> float:
        """Total bytes read (equation 3)."""
        return self.weight_bytes + self.cache_bytes

    @property
    def seconds(self) -> float:
        """The longer of the two times: computation and reads overlap ideally (equation 6)."""
        return max(self.compute_seconds, self.read_seconds)

    @property
    def cache_share(self) -> float:
        """Time of the cache reads as a share of the step (figure 6)."""
        return self.read_seconds * self.cache_bytes / self.bytes / self.seconds


def operations(config: ModelConfig, *, batch: int, live_tokens: float | int) -> float:
    """Operations of a step (equation 2).

    Args:
      config: the model.
      batch: B.
      live_tokens: S, in the cache of each sequence, averaged over layers and KV heads.

    Raises:
      ConfigError: a number is not positive.
    """
    batch, live_tokens = _sizes(batch, live_tokens)
    attended = 4 * config.num_heads * config.head_dim * live_tokens
    layers = config.num_layers * (2 * _layer_parameters(config) + attended)
    return float(batch * (layers + 2 * config.hidden_size * config.vocab_size))


def weight_bytes(config: ModelConfig) -> float:
    """Bytes of the weights that a step reads: the first part of equation 3."""
    layers = config.num_layers * _layer_parameters(config)
    return BYTES * float(layers + config.hidden_size * config.vocab_size)


def cache_bytes(config: ModelConfig, *, batch: int, live_tokens: float | int) -> float:
    """Bytes of the keys and values that a step reads: the last part of equation 3.

    Args:
      config: the model.
      batch: B.
      live_tokens: S, in the cache of each sequence, averaged over layers and KV heads.

    Raises:
      ConfigError: a number is not positive.
    """
    batch, live_tokens = _sizes(batch, live_tokens)
    entry = 2 * BYTES * config.num_layers * config.num_kv_heads * config.head_dim
    return float(batch * live_tokens * entry)


def step(
    config: ModelConfig,
    device: Device,
    *,
    tokens: float | int,
    batch: int = 1,
    compression_ratio: float | int = 1,
) -> Step:
    """Estimates a decode step.

    Args:
      config: the model.
      device: the accelerator's figures; see `dms_jax.devices.DEVICES`.
      tokens: length of each sequence.
      batch: number of sequences.
      compression_ratio: tokens over live tokens.

    Raises:
      ConfigError: a number is not positive, or `device` is no Device.
    """
    if not isinstance(device, Device):
        raise ConfigError(f"The device must be a dms_jax.Device, got {device!r:.80}.")
    live = check("tokens", tokens, NotNegative) / check("ratio", compression_ratio, Ratio)
    count = operations(config, batch=batch, live_tokens=live)
    weights = weight_bytes(config)
    cache = cache_bytes(config, batch=batch, live_tokens=live)
    return Step(
        operations=count,
        weight_bytes=weights,
        cache_bytes=cache,
        compute_seconds=count / device.peak,
        read_seconds=(weights + cache) / device.bandwidth,
    )


def _layer_parameters(config: ModelConfig) -> int:
    """Parameters in the matrices of a layer.

    Raises:
      ConfigError: the model has experts or windows, which the paper does not cover.
    """
    require(
        config.experts is None and config.window is None,
        "The latency model of the DMS paper is one of dense feed-forwards and full attention; for "
        "experts or windows see dms_jax.estimate.",
    )
    heads = 2 * config.num_heads + 2 * config.num_kv_heads
    return config.hidden_size * (3 * config.intermediate_size + heads * config.head_dim)


def _sizes(batch: int, live_tokens: Number) -> tuple[int, Number]:
    return check("batch", batch, Count), check("live_tokens", live_tokens, NotNegative)
