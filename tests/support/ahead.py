"""Compiles programs ahead of time for absent devices, and caches the compiler's reports.

jax caches executables, but cannot load one without its device. Tests need only the text and the
memory of a program: these are cached beside jax's own cache, keyed by a hash of all compiler
inputs. A changed program, option or compiler is compiled again.
"""

import dataclasses
import gzip
import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

# The folder of the plugin of `make gpu-compiler`, and that of `.ci/newest` for another jax; in
# Python's environment the plugin would slow every start of jax.
_ROOT = Path(__file__).resolve().parents[2]
GPU_COMPILER = _ROOT / os.environ.get("GPU_COMPILER", ".gpu_compiler")
# The compiler's packages, and environment variables that change its output.
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda13-plugin")
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_ACCELERATOR_TYPE")
SETTINGS = ("jax_disable_most_optimizations", "jax_optimization_level")


@dataclasses.dataclass(frozen=True)
class Memory:
    """The memory of a program; see `jax.stages.Compiled.memory_analysis`."""

    alias_size_in_bytes: int
    argument_size_in_bytes: int
    output_size_in_bytes: int
    temp_size_in_bytes: int


@dataclasses.dataclass(frozen=True)
class Report:
    """The compiler's report on a program: its text and memory."""

    text: str
    memory: Memory


def compile_ahead(lowered: Any, target: str, options: dict[str, Any] | None = None) -> Report:
    """Compiles a lowered program, or reads its cached report.

    Args:
      lowered: the result of `jax.jit(f).lower`.
      target: the topology, or the kind and number of devices.
      options: compiler options beside those of the jitted function.

    Raises:
      The compiler's errors; failures are not cached.
    """
    kept = _place(lowered, target, options)
    if kept is not None and kept.exists():
        data = json.loads(gzip.decompress(kept.read_bytes()))
        return Report(data["text"], Memory(**data["memory"]))
    compiled = lowered.compile(compiler_options=options)
    analysis = compiled.memory_analysis()
    fields = [field.name for field in dataclasses.fields(Memory)]
    report = Report(
        compiled.as_text(), Memory(**{name: getattr(analysis, name) for name in fields})
    )
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        beside = kept.with_suffix(f".{os.getpid()}")
        beside.write_bytes(gzip.compress(json.dumps(dataclasses.asdict(report)).encode(), 1))
        beside.replace(kept)
    return report


def _place(lowered: Any, target: str, options: dict[str, Any] | None) -> Path | None:
    """Returns the file of a program's report, or None without a cache."""
    import jax  # after tests/conftest.py has set up jax

    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if not folder:
        return None
    own = lowered._lowering._compiler_options_kvs
    versions = {one: metadata.version(one) for one in COMPILERS if _installed(one)}
    given = (
        target,
        sorted(own),
        sorted((options or {}).items()),
        sorted(versions.items()),
        [os.environ.get(name) for name in ENVIRONMENT],
        [str(jax.config.values[name]) for name in SETTINGS],
    )
    key = hashlib.sha256(repr(given).encode())
    key.update(lowered.as_text().encode())
    return Path(folder) / "ahead" / f"{key.hexdigest()}.json.gz"


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
