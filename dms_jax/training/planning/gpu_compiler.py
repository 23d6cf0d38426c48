"""XLA's compiler for GPUs that are not there.

jax's plugin for CUDA compiles for devices that are described to it. It needs neither a GPU, nor a
driver, nor the libraries of CUDA: `pip install jax-cuda13-pjrt jax-cuda13-plugin`, 142 MB. What it
makes is the program that the devices would run, with the kernels and collectives that they would
run.
"""

import importlib.util
from pathlib import Path
from typing import Any

from dms_jax.devices import DEVICES

_PLUGIN = "jax_plugins.xla_cuda13"

# Those that differ in nothing but their memory from what is written below.
_HOPPER = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}
# In the form of XLA's own descriptions of targets (xla/backends/gpu/target_config).
_DESCRIPTION = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory:.0f}
  cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{name}"
"""


def compiles_for(kind: str) -> bool:
    """Whether GPUs of a kind (`dms_jax.devices.DEVICES`) can be compiled for here."""
    return kind in _HOPPER and _folder() is not None


def devices(kind: str, count: int, *, a_host: int) -> list[Any]:
    """Returns abstract GPUs to compile for, on hosts with `a_host` of them each.

    Args:
      kind: a kind that is compiled for here.
      count: number of GPUs.
      a_host: the most that a host has.
    """
    from jax._src import xla_bridge  # registers a plugin without asking it for devices
    from jax._src.lib import xla_client
    from jax.experimental import topologies

    folder = _folder()
    assert folder is not None
    if not xla_client.pjrt_plugin_loaded("cuda"):
        xla_bridge.register_plugin("cuda", library_path=str(folder / "xla_cuda_plugin.so"))
    sheet = DEVICES[kind]
    description = _DESCRIPTION.format(
        bandwidth=sheet.bandwidth, memory=sheet.memory, name=_HOPPER[kind]
    )
    hosts = -(-count // a_host)
    options = {"target_config": description, "topology": f"1x{hosts}x{min(count, a_host)}"}
    found = topologies.get_topology_desc("", "cuda", **options)
    return list(found.devices)[:count]


def _folder() -> Path | None:
    """Returns where the plugin is; None if it is not installed."""
    if importlib.util.find_spec(_PLUGIN.partition(".")[0]) is None:
        return None
    found = importlib.util.find_spec(_PLUGIN)
    return None if found is None else Path(next(iter(found.submodule_search_locations or ())))
