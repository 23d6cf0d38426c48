"""Executables on disk: compiled programs that a new process runs without tracing.

jax's cache needs traced and lowered programs, and for a GPU lowering takes a second or two each.
Here the key covers everything that tracing depends on:

    the source        of `dms_jax` and `pallas_kernels`, and the tuned settings of the kernels
    what compiles     versions of jax, its plugins and NVIDIA's libraries, the device, XLA's flags
    the program       its function, compiler options, jax's settings, and static arguments
    the arguments     their tree, and the shape, dtype and sharding of each array; no values

A program that depends on anything else is not kept: a policy class of another package, or a program
of several processes. If a source file has changed since the process started, nothing is kept or
read. Turn the cache off if you replace functions of the library at run time.

Files are written atomically. A file that is damaged or cannot be loaded counts as missing. Files
are pickles (`jax.experimental.serialize_executable`) and executables are code, so whoever can write
here decides what runs, as in jax's cache.

They are in a subdirectory of jax's cache (see `compilation`); DMS_JAX_COMPILATION_CACHE=off keeps
none. Beyond 4 GB the least recently used are deleted.
"""

import dataclasses
import enum
import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import pathlib
import pickle
import tempfile
import time
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from dms_jax import compilation

MOST_BYTES = 4 * 10**9

_logger = logging.getLogger("dms_jax")
_FORMAT = b"dms_jax executable 1\n"
# Packages whose names identify their contents, because the key has their source or version.
_PACKAGES = {"dms_jax", "pallas_kernels", "jax", "jaxlib", "flax", "numpy", "ml_dtypes", "builtins"}
_VERSIONS = (
    "jax",
    "jaxlib",
    "flax",
    "numpy",
    "ml_dtypes",
    "libtpu",
    *(f"jax-cuda{cuda}-{part}" for cuda in (12, 13) for part in ("plugin", "pjrt")),
    *(
        f"nvidia-{library}{end}"
        for library in ("cublas", "cudnn")
        for end in ("", "-cu12", "-cu13")
    ),
)
# Read at import: XLA reads them once, and libraries imported later change them.
_ENVIRONMENT = {
    name: os.environ.get(name) for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE")
}
# jax settings that affect no program: caching and logging.
_NO_SETTINGS = (
    "jax_compilation_cache_",
    "jax_enable_compilation_cache",
    "jax_persistent_cache_",
    "jax_log",
    "jax_debug_log",
    "jax_dump_ir_",
    "jax_pprint_",
    "jax_traceback_",
    "jax_tracer_error_",
    "jax_explain_",
)
_BEGUN = time.time()
_PLAIN = {bool, int, float, str, bytes}


class _UnknownError(Exception):
    """A program depends on a value that `describe` does not know."""


def directory() -> pathlib.Path | None:
    """Returns the directory of executables; None if they are not kept."""
    base = compilation.directory()
    if compilation.is_off() or not base or "://" in base or jax.process_count() > 1:
        return None
    place = pathlib.Path(base) / "executables"
    try:
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        _logger.info("Executables are not kept: %s", error)
        return None
    return place


def key_of(function: Any, options: Mapping[str, Any], signature: Any) -> str | None:
    """Returns the file name of an executable; None if `describe` does not know all its inputs.

    Args:
      function: the function of the program.
      options: compiler options and other settings of the program.
      signature: its arguments, as shapes.
    """
    source = _source()
    if source is None:
        return None
    try:
        program = [describe(function), describe(dict(options)), describe(signature)]
    except _UnknownError as error:
        _logger.debug("An executable of %s is not kept: %s", function, error)
        return None
    settings = {
        name: str(value)
        for name, value in jax.config.values.items()
        if not name.startswith(_NO_SETTINGS)
    }
    client = jax.devices()[0].client
    device = [client.platform, client.platform_version, jax.devices()[0].device_kind]
    everything = [source, _versions(), _ENVIRONMENT, settings, device, jax.device_count(), program]
    return hashlib.sha256(json.dumps(everything, sort_keys=True).encode()).hexdigest()


def describe(x: Any) -> Any:
    """Returns a value as JSON data that is equal in all processes with equal programs.

    Raises:
      _UnknownError: the value is of an unknown kind.
    """
    if x is None or type(x) in _PLAIN:
        return [type(x).__name__, repr(x)]
    if isinstance(x, np.dtype):
        return ["dtype", x.name]
    if isinstance(x, type) or (callable(x) and hasattr(x, "__qualname__")):
        return ["name", _name(x)]
    if isinstance(x, jax.tree_util.PyTreeDef):
        return ["tree", _describe_tree(x)]
    if isinstance(x, enum.Enum):
        return [_name(type(x)), x.name]
    if isinstance(x, PartitionSpec):
        return ["spec", [describe(axis) for axis in x]]
    if isinstance(x, Mesh):
        kinds = [str(kind) for kind in x.axis_types]
        return ["mesh", x.axis_names, x.devices.shape, [*map(_device, x.devices.flat)], kinds]
    if isinstance(x, NamedSharding):
        return ["named", describe(x.mesh), describe(x.spec), x.memory_kind]
    if isinstance(x, SingleDeviceSharding):
        return ["single", [*map(_device, x.device_set)], x.memory_kind]
    if isinstance(x, jax.ShapeDtypeStruct):
        return ["shape", x.shape, x.dtype.name, describe(x.sharding)]
    if isinstance(x, tuple | list):
        return [_name(type(x)), [describe(each) for each in x]]
    if isinstance(x, Mapping):
        items = sorted(([describe(name), describe(each)] for name, each in x.items()), key=str)
        return [_name(type(x)), items]
    if dataclasses.is_dataclass(x):
        fields = {each.name: describe(getattr(x, each.name)) for each in dataclasses.fields(x)}
        return [_name(type(x)), fields]
    raise _UnknownError(f"a {type(x)} has no description")


def _device(x: jax.Device) -> str:
    return f"{x.platform} {x.id} {x.device_kind}"


def _describe_tree(tree: Any) -> Any:
    node = tree.node_data()
    if node is None:
        return "*"
    kind, data = node
    return [_name(kind), describe(data), [_describe_tree(each) for each in tree.children()]]


def _name(x: Any) -> str:
    if x.__module__.partition(".")[0] not in _PACKAGES or "<" in x.__qualname__:
        raise _UnknownError(f"{x.__module__}.{x.__qualname__} has no source that is known")
    return f"{x.__module__}.{x.__qualname__}"


@functools.cache
def _source() -> str | None:
    """Returns a digest of the library's source; None if it changed since the process started."""
    digest, number = hashlib.sha256(), 0
    for package in ("dms_jax", "pallas_kernels"):
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.submodule_search_locations
        root = pathlib.Path(spec.submodule_search_locations[0])
        for file in sorted((*root.rglob("*.py"), *root.glob("tuned/*.json"))):
            try:
                found, content = file.stat(), file.read_bytes()
            except OSError:
                return None
            if max(found.st_mtime, found.st_ctime) > _BEGUN:  # installers set st_mtime back
                return None
            digest.update(f"{package}/{file.relative_to(root)}\0{len(content)}\0".encode())
            digest.update(content)
            number += 1
    if not number:  # the packages were installed without their source
        return None
    return digest.hexdigest()


@functools.cache
def _versions() -> dict[str, str]:
    found = {}
    for name in _VERSIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def read(key: str, tree: Any, devices: Iterable[Any]) -> Any:
    """Returns the executable of a key (`jax.stages.Compiled`), or None if there is none.

    Args:
      key: see `key_of`.
      tree: the structure of its arguments.
      devices: devices that it runs on, in the order of its sharding.
    """
    place, start = directory(), time.monotonic()
    if place is None:
        return None
    try:
        content = (place / key).read_bytes()
    except OSError:
        return None
    head, payload = content[: len(_header(key, b""))], content[len(_header(key, b"")) :]
    if head != _header(key, payload):
        return None
    devices = list(devices)
    import_runtime(devices[0].platform)
    try:
        executable, out_tree = pickle.loads(payload)
        loaded = serialize_executable.deserialize_and_load(
            executable, tree, out_tree, backend=devices[0].client, execution_devices=devices
        )
        os.utime(place / key)  # mark as used
    except Exception as error:  # on any error of XLA or pickle, compile instead
        _logger.info("The executable %s cannot be used: %s", place / key, error)
        return None
    compilation.note_read(start)
    return loaded


def import_runtime(platform: str) -> None:
    """Imports the libraries that executables of a platform need when they are loaded."""
    if platform == "gpu":  # locates Mosaic's runtime; tracing a kernel would import it too
        importlib.import_module("jax.experimental.mosaic.gpu")


def keep(key: str, compiled: Any) -> None:
    """Writes an executable if possible, and deletes the least recently used ones beyond the limit.

    Args:
      key: see `key_of`.
      compiled: fresh from the compiler (see `compilation.compile_anew`).
    """
    place = directory()
    if place is None:
        return
    try:
        executable, _, out_tree = serialize_executable.serialize(compiled)
        payload = pickle.dumps((executable, out_tree), pickle.HIGHEST_PROTOCOL)
        with tempfile.NamedTemporaryFile(dir=place, delete=False) as file:  # of mode 0600
            try:
                file.write(_header(key, payload))
                file.write(payload)
                file.close()
                os.replace(file.name, place / key)
            except BaseException:
                os.unlink(file.name)
                raise
        _delete_oldest(place)
    except Exception as error:  # a full disk, or a program that cannot be serialized
        _logger.info("An executable was not kept: %s", error)


def _header(key: str, payload: bytes) -> bytes:
    return _FORMAT + key.encode() + hashlib.sha256(payload).hexdigest().encode()


def _delete_oldest(place: pathlib.Path) -> None:
    files = sorted((each.stat().st_mtime, each.stat().st_size, each) for each in place.iterdir())
    total = sum(size for _, size, _ in files)
    for _, size, file in files:
        if total <= MOST_BYTES:
            return
        file.unlink(missing_ok=True)
        total -= size
