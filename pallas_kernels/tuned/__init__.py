"""Measured settings of the kernels, one JSON file per kind of device.

A file maps a kernel's name to a list of entries, tried in order. An entry applies where every value
in its `when` equals that of the shape in question; its `use` holds the settings.

    {"device": "NVIDIA H200", "kernels": {"decode_attention/mosaic_gpu": [
        {"when": {"head_dim": 128, "bytes": 2}, "use": {"stages": 2, "programs_per_core": 2}}]}}

A device without an entry for a shape uses that of another device of its architecture, if there is
one (`dispatch.GPU.measured_as`); otherwise the kernel's heuristic chooses the settings.
"""

import functools
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any


def file_name(device_kind: str) -> str:
    """Returns the file name of a device kind: "NVIDIA H200" gives nvidia_h200.json."""
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_") + ".json"


@functools.cache
def _entries(device_kind: str, kernel: str) -> tuple[dict[str, Any], ...]:
    path = resources.files(__name__) / file_name(device_kind)
    if not path.is_file():
        return ()
    return tuple(json.loads(path.read_text())["kernels"].get(kernel, ()))


def lookup(device_kinds: Sequence[str], kernel: str, **shape: Any) -> dict[str, Any] | None:
    """Finds the measured settings of a kernel for a shape.

    Args:
      device_kinds: device kinds, under jax's names, whose settings may be used, the best first.
      kernel: "operation/implementation".
      **shape: the values to compare with the `when` of an entry.

    Returns:
      The settings of the first entry that applies, or None.
    """
    for kind in device_kinds:
        for entry in _entries(kind, kernel):
            if all(shape.get(name) == value for name, value in entry["when"].items()):
                return dict(entry["use"])
    return None
