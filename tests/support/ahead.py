"""Programs compiled ahead of time for absent devices; their reports are kept from run to run.

jax keeps executables, and cannot read one back without the device that it is for. Tests need the
text and the memory of such a program: these are kept beside jax's own cache, by a hash of all that
the compiler is given. A changed program, option or compiler is compiled again.
"""

import dataclasses
import gzip
import hashlib
import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

# Where `make gpu-compiler` puts the plugin, and `.ci/newest` that of another jax: in the
# environment of Python it would slow every start of jax.
_ROOT = Path(__file__).resolve().parents[2]
GPU_COMPILER = _ROOT / os.environ.get("GPU_COMPILER", ".gpu_compiler")
# What compiles, and what tells it how beside the options of a program.
COMPILERS = ("jax", "jaxlib", "libtpu", "jax-cuda13-pjrt", "jax-cuda13-plugin")
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "TPU_ACCELERATOR_TYPE")
SETTINGS = ("jax_disable_most_optimizations", "jax_optimization_level")


@dataclasses.dataclass(frozen=True)
class Memory:
    """What a program needs; see `jax.stages.Compiled.memory_analysis`."""

    alias_size_in_bytes: int
    argument_size_in_bytes: int
    output_size_in_bytes: int
    temp_size_in_bytes: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What a compiler said of a program: its text, and its memory."""

    text: str
    memory: Memory


def compile_ahead(lowered: Any, target: str, options: dict[str, Any] | None = None) -> Report:
    """Compiles a lowered program, or reads what the compiler said of it before.

    Args:
      lowered: what `jax.jit(f).lower` returns.
      target: what it is lowered for: the topology, or the kind and number of devices.
      options: options of the compiler beside those that the function was jitted with.

    Raises:
      Whatever the compiler raises: failures are not kept.
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
    """Returns the file of a program's report, or None where nothing is kept."""
    import jax  # not at the top: tests/conftest.py sets jax up first

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
