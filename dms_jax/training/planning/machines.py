"""The machines that a plan is made for, by name, and the topology that stands for each.

    v5p-128            a TPU slice by its type: v5p counts cores, two a chip; v5e and v6e chips
    8xh200, h200       GPUs, eight to a host; or chips (4xv5p), whether a slice has so many or not

TPU programs are compiled for their own topology, and those of H100 and H200 by their own compiler
where it is installed (`gpu_compiler`) or where the GPUs are. Otherwise the plan of GPUs compiles
the same step for as many chips of v5p, which partitions it alike.
"""

import dataclasses
import math
import re
from typing import Any

import jax

from dms_jax.devices import DEVICES, Device, data_sheet
from dms_jax.errors import ConfigError
from dms_jax.training.planning import gpu_compiler

GPUS_A_HOST = 8
_CORES_A_CHIP = {"v5p": 2, "v5e": 1, "v6e": 1}
_OTHER_NAMES = {"v5litepod": "v5e"}
_STAND_IN = "v5p"
_LARGEST = 4096


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind.

    Attributes:
      name: the name that was asked for.
      kind: key of `dms_jax.devices.DEVICES`.
      count: number of devices: chips or GPUs.
    """

    name: str
    kind: str
    count: int

    @property
    def device(self) -> Device:
        """The data sheet of one device."""
        return DEVICES[self.kind]

    @property
    def compiled(self) -> bool:
        """Whether the plan's program is that of the machine's own compiler."""
        return self.is_tpu or gpu_compiler.compiles_for(self.kind)

    @property
    def is_tpu(self) -> bool:
        """Whether the devices are chips of a TPU slice."""
        return self.kind in _CORES_A_CHIP

    @property
    def topology(self) -> str:
        """Name of the TPU topology that stands for it; it may have more devices than are used."""
        kind = self.kind if self.is_tpu else _STAND_IN
        return f"{kind}:{_grid(self.count, 3 if kind == 'v5p' else 2)}"

    def devices_here(self) -> list[Any]:
        """Returns as many devices of this process.

        Raises:
          ConfigError: there are too few of this kind.
        """
        found = [x for x in jax.devices() if data_sheet(x.device_kind) == self.device]
        if len(found) < self.count:
            raise ConfigError(
                f"{self.name} is planned with its own compiler where it is, and there are "
                f"{len(found)} of them here. Plan without --here for an estimate."
            )
        return found[: self.count]

    def devices(self) -> list[Any]:
        """Returns the abstract devices to compile for.

        Raises:
          ConfigError: libtpu is not installed.
        """
        if not self.is_tpu and self.compiled:
            return gpu_compiler.devices(self.kind, self.count, a_host=GPUS_A_HOST)
        from jax.experimental import topologies

        try:
            found = topologies.get_topology_desc(platform="tpu", topology_name=self.topology)
        except (RuntimeError, ValueError) as error:
            raise ConfigError(
                f"A plan for {self.name} is compiled by libtpu for {self.topology}, and that "
                f"failed: {error}. Install it (pip install 'dms-jax[tpu]', on Linux)."
            ) from error
        return list(found.devices)[: self.count]


def find_machine(name: str) -> Machine:
    """Returns the machine of a name.

    Raises:
      ConfigError: there is no such machine.
    """
    text = str(name).strip().lower()
    if found := re.fullmatch(r"(?:(\d+)\s*x\s*)?([a-z]+\w*)", text):
        kind, count = _kind(found[2]), int(found[1] or 1)
    elif (found := re.fullmatch(r"(\w+)-(\d+)", text)) and _kind(found[1]) in _CORES_A_CHIP:
        kind = _kind(found[1])
        count, rest = divmod(int(found[2]), _CORES_A_CHIP[kind])
        count = 0 if rest else count
    else:
        kind, count = text, 0
    if kind in DEVICES and count > _LARGEST:
        raise ConfigError(
            f"{name!r} has {count} devices, and a plan is made for {_LARGEST} at most."
        )
    if kind not in DEVICES or not count:
        kinds = ", ".join(DEVICES)
        raise ConfigError(
            f"There is no machine {name!r}. Give a TPU slice ('v5p-128', 'v6e-256') or a number of "
            f"devices ('8xh200'), up to {_LARGEST}, of {kinds}."
        )
    return Machine(str(name), kind, count)


def _kind(name: str) -> str:
    return _OTHER_NAMES.get(name, name)


def _grid(count: int, dimensions: int) -> str:
    """Returns the smallest grid of powers of two that holds `count` chips, as even as can be.

    # In: 64, 3  Out: 4x4x4     In: 32, 2  Out: 4x8     In: 1, 3  Out: 2x2x1
    """
    power = max(2, math.ceil(math.log2(count)))
    sides = [2 ** ((power + place) // dimensions) for place in range(dimensions)]
    if dimensions == 3 and power == 2:
        return "2x2x1"
    return "x".join(map(str, sides))
