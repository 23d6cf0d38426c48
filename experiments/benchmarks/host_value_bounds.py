"""When values in host memory pay off (KCache, arXiv 2404.18057, Table 1 and equations 1 to 4).

The paper assumes one KV head per query head. Under grouped queries a layer of H query and K KV
heads of D numbers, batch B, S tokens, N fetched per query head and two bytes per number, reads in a
step

    scores      2 B (H D + K S D + H S)                  queries, keys, weights
    sum, plain  2 B (H S + K S D + H D)                  weights, values, outputs
    sum, KCache 2 B (H N + H N D + H D)                  and 2 B H N D over the link

so that reading is saved where (equation 3, with G = H / K and S, D far above 1)

    H N D / link < (K S D - H N D) / device    <=>    S / N > G (device / link + 1)

For G = 1 that is equation 4 except for the read of the fetched rows, which it leaves out. The
values of the prompt are copied to the host while the next layer is computed, which hides the copy
if (equation 1)

    operations of a layer / peak > 2 B S K D / link back
"""

import dataclasses

from dms_jax.checks import Count, Positive, check
from dms_jax.config import ModelConfig
from dms_jax.errors import ConfigError
from dms_jax.policies import KCache

BYTES = 2  # bfloat16, as the paper counts


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of the attention of one decode step over all layers.

    Attributes:
      fetched: read over the link from the host.
      read: read from device memory, the fetched rows included.
      plain: read from device memory if all values were on the device.
      host: bytes of the values in host memory.
    """

    fetched: int
    read: int
    plain: int
    host: int


def step_traffic(config: ModelConfig, policy: KCache, *, tokens: int, batch: int = 1) -> Traffic:
    """Computes Table 1 for a whole model.

    Args:
      config: configuration of the model.
      policy: provides N and the number of first layers; its rows hold every token.
      tokens: S, tokens in the cache.
      batch: B.

    Raises:
      ConfigError: a number is not positive.
    """
    tokens, batch = check("tokens", tokens, Count), check("batch", batch, Count)
    heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
    first = min(policy.first_layers, config.num_layers)
    others = config.num_layers - first
    if tokens <= policy.top:
        raise ConfigError(
            f"With {tokens} tokens and top={policy.top} everything is fetched: there is nothing "
            "to save."
        )
    scores = heads * head_dim + kv_heads * tokens * head_dim + heads * tokens
    plain = heads * tokens + kv_heads * tokens * head_dim + heads * head_dim
    fetched = heads * policy.top * head_dim
    chosen = heads * policy.top + fetched + heads * head_dim
    scale = BYTES * batch
    return Traffic(
        fetched=scale * others * fetched,
        read=scale * (config.num_layers * scores + first * plain + others * chosen),
        plain=scale * config.num_layers * (scores + plain),
        host=scale * others * kv_heads * tokens * head_dim,
    )


def break_even(
    config: ModelConfig, *, device_bandwidth: float | int, link_bandwidth: float | int
) -> float:
    """The S / N above which fetching is faster than reading all values (equation 4, any G).

    Args:
      config: configuration of the model.
      device_bandwidth: bytes per second of device memory.
      link_bandwidth: bytes per second from the host, as measured for such fetches.

    Raises:
      ConfigError: a bandwidth is not positive.
    """
    device_bandwidth = check("device_bandwidth", device_bandwidth, Positive)
    link_bandwidth = check("link_bandwidth", link_bandwidth, Positive)
    return config.group_size * (device_bandwidth / link_bandwidth + 1)


def prompt_hides_copies(
    config: ModelConfig, *, tokens: int, peak: float | int, link_bandwidth: float | int
) -> float:
    """Ratio of the compute time of a prompt layer to the copy time of its values (equation 1).

    Args:
      config: configuration of the model.
      tokens: S, prompt tokens processed together.
      peak: operations per second.
      link_bandwidth: bytes per second to the host.
    """
    embed, head_dim = config.hidden_size, config.head_dim
    weights = embed * head_dim * 2 * (config.num_heads + config.num_kv_heads)
    weights += 3 * embed * config.intermediate_size
    # Causal attention is half of S^2; the paper counts all of it.
    operations = 2 * tokens * weights + 4 * tokens**2 * config.num_heads * head_dim
    copied = BYTES * tokens * config.num_kv_heads * head_dim
    return (operations / peak) / (copied / link_bandwidth)
