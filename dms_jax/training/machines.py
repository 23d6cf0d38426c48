"""The machines that a plan can be made for, by name.

v5p-128            a TPU slice by its type: v5p counts cores, two a chip; v5e and v6e chips
8xh200, h200       GPUs, or a number of chips (4xv5p)
"""

import dataclasses
import math
import re
from typing import Any

from dms_jax.devices import DEVICES, Device
from dms_jax.errors import ConfigError

_CORES_A_CHIP = {"v5p": 2, "v5e": 1, "v6e": 1}
_OTHER_NAMES = {"v5litepod": "v5e"}
_STAND_IN = "v5p"
_LARGEST = 4096


@dataclasses.dataclass(frozen=True)
class Machine:
    """Devices of one kind.

    Attributes:
      name: the name given by the user.
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
    def is_tpu(self) -> bool:
        """Whether the devices are chips of a TPU slice."""
        return self.kind in _CORES_A_CHIP

    @property
    def topology(self) -> str:
        """The TPU topology to compile for (v5p for GPUs); it may have unused devices.

        # In: 64 chips of v5p  Out: v5p:4x4x4     In: 8 of v6e  Out: v6e:2x4
        """
        kind = self.kind if self.is_tpu else _STAND_IN
        power = max(2, math.ceil(math.log2(self.count)))
        dimensions = 3 if kind == "v5p" else 2
        sides = [2 ** ((power + place) // dimensions) for place in range(dimensions)]
        if kind == "v5p" and power == 2:  # a slice of four chips is flat
            sides = [2, 2, 1]
        return f"{kind}:{'x'.join(map(str, sides))}"

    def devices(self) -> list[Any]:
        """Returns the abstract devices to compile for.

        Raises:
          ConfigError: libtpu is not installed.
        """
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
    text, kind, count = str(name).strip().lower(), "", 0
    if found := re.fullmatch(r"(?:(\d+)\s*x\s*)?([a-z]\w*)", text):
        kind, count = _OTHER_NAMES.get(found[2], found[2]), int(found[1] or 1)
    elif found := re.fullmatch(r"(\w+)-(\d+)", text):
        kind = _OTHER_NAMES.get(found[1], found[1])
        count, rest = divmod(int(found[2]), _CORES_A_CHIP.get(kind, 1))
        if rest or kind not in _CORES_A_CHIP:
            count = 0
    if kind not in DEVICES or not 0 < count <= _LARGEST:
        raise ConfigError(
            f"There is no machine {name!r}. Give a TPU slice ('v5p-128', 'v6e-256') or a number of "
            f"devices ('8xh200'), up to {_LARGEST}, of {', '.join(DEVICES)}."
        )
    return Machine(str(name), kind, count)
