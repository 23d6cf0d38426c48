"""XLA's compiler for absent GPUs.

jax's CUDA plugin compiles for described devices. It needs neither a GPU, nor a driver, nor CUDA
libraries: `pip install jax-cuda13-pjrt jax-cuda13-plugin`, 142 MB. The program is the one that such
devices would run, with its kernels and collectives.
"""

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

from dms_jax.devices import DEVICES


@dataclasses.dataclass(frozen=True)
class Card:
    """The compiler's description of a GPU, beside its data sheet.

    Attributes:
      name: as jax names it.
      capability: the compute capability.
      cores: number of streaming multiprocessors.
      threads: threads of a core.
      shared: bytes of shared memory of a core; a program has at most 1 KB less.
      l2: bytes of the second cache.
      clock: GHz.
      links: number of NVLinks; between cards that have any, XLA sums small arrays by kernels of its
        own, not by NCCL.
    """

    name: str
    capability: tuple[int, int]
    cores: int
    threads: int
    shared: int
    l2: int
    clock: float
    links: int


CARDS = {
    "h200": Card("NVIDIA H200", (9, 0), 132, 2048, 233472, 50 << 20, 1.98, 18),
    "h100": Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 2048, 233472, 50 << 20, 1.98, 18),
    "a100": Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 2048, 167936, 40 << 20, 1.41, 12),
    "l4": Card("NVIDIA L4", (8, 9), 58, 1536, 102400, 48 << 20, 2.04, 0),
    "b200": Card("NVIDIA B200", (10, 0), 148, 2048, 233472, 126 << 20, 1.97, 18),
}
# In the form of XLA's target descriptions (xla/backends/gpu/target_config). Without a CUDA version
# that supports them, products and collectives would stay outside CUDA graphs.
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {card.shared}
  shared_memory_per_block_optin: {most_shared}
  threads_per_core_limit: {card.threads}
  core_count: {card.cores}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {card.l2}
  clock_rate_ghz: {card.clock}
  device_memory_size: {memory:.0f}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  device_interconnect_info {{ active_links: {card.links} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{card.name}"
"""


def devices(kind: str, count: int, *, a_host: int) -> list[Any]:
    """Returns abstract GPUs to compile for, `a_host` per host.

    Args:
      kind: one of `CARDS`.
      count: number of GPUs.
      a_host: the most GPUs of a host.
    """
    from jax._src import xla_bridge  # registers a plugin without asking it for devices
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    found = importlib.util.find_spec("jax_plugins.xla_cuda13")
    assert found is not None, "the compiler for GPUs is not there: `make gpu-compiler`"
    folder = Path(next(iter(found.submodule_search_locations or ())))
    if not xla_client.pjrt_plugin_loaded("cuda"):
        xla_bridge.register_plugin("cuda", library_path=str(folder / "xla_cuda_plugin.so"))
    sheet = DEVICES[kind]
    card = CARDS[kind]
    major, minor = card.capability
    description = _DESCRIPTION.format(
        bandwidth=sheet.bandwidth,
        memory=sheet.memory,
        card=card,
        most_shared=card.shared - 1024,
        major=major,
        minor=minor,
    )
    hosts = -(-count // a_host)
    options = {"target_config": description, "topology": f"1x{hosts}x{min(count, a_host)}"}
    return list(topologies.get_topology_desc("", "cuda", **options).devices)[:count]
