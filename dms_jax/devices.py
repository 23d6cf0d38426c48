"""Data sheets of accelerators, and detection of their out-of-memory errors."""

import contextlib
import dataclasses
from typing import Any

import jax

from dms_jax.checks import Options, Positive
from dms_jax.errors import OutOfMemoryError


@dataclasses.dataclass(frozen=True)
class Device(Options):
    """An accelerator's figures from its data sheet.

    Attributes:
      memory: size of its memory in bytes.
      bandwidth: memory bandwidth in bytes per second.
      peak: peak rate in bfloat16 operations per second.
      link: bytes per second from one device to its neighbours (NVLink, PCIe, ICI), in one
        direction.
      network: bytes per second from one device to another host; None if all devices of a system are
        linked. For GPUs: an InfiniBand port of 400 Gbit/s each, or their share of the host's.
    """

    memory: Positive
    bandwidth: Positive
    peak: Positive
    link: Positive | None = None
    network: Positive | None = None


DEVICES = {
    "b200": Device(180e9, 8e12, 2250e12, 900e9, 50e9),
    "h200": Device(141e9, 4.8e12, 989e12, 450e9, 50e9),
    "h100": Device(80e9, 3.35e12, 989e12, 450e9, 50e9),
    "a100": Device(80e9, 2.04e12, 312e12, 300e9, 25e9),
    "l4": Device(24e9, 300e9, 121e12, 32e9, 1.5e9),
    "t4": Device(16e9, 320e9, 65e12, 16e9, 1.5e9),
    "v5e": Device(16e9, 819e9, 197e12, 200e9),
    "v5p": Device(95e9, 2.77e12, 459e12, 600e9),
    "v6e": Device(32e9, 1.64e12, 918e12, 448e9),
}

# Names in jax (`jax.Device.device_kind`). Other members of a family differ in speed.
_KINDS = {
    "NVIDIA B200": "b200",
    "NVIDIA H200": "h200",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA L4": "l4",
    "Tesla T4": "t4",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v6 lite": "v6e",
}


def data_sheet(kind: str) -> Device | None:
    """Returns the figures of a kind of device (`jax.Device.device_kind`); None if unknown."""
    name = _KINDS.get(kind)
    return None if name is None else DEVICES[name]


def out_of_memory(error: BaseException) -> bool:
    """Returns whether an error means that the device could not allocate memory."""
    return isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


class _FitsDevice:
    """See `fits_device`.

    A class, because the frame of a generator-based context would keep the replaced error alive, and
    with it, until Python collects cycles, every array of the failed work.
    """

    def __init__(self, otherwise: str):
        self._otherwise = otherwise

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None and out_of_memory(error):
            raise OutOfMemoryError(self._otherwise) from error


def fits_device(otherwise: str) -> contextlib.AbstractContextManager[None]:
    """A context that turns device allocation errors into OutOfMemoryError("otherwise")."""
    return _FitsDevice(otherwise)
