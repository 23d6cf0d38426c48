"""Runs pytest repeatedly, each time in a fork of a process that has imported the libraries.

    python -m tests.mutants.warm    in a copy of the tree

For each line of JSON, {"arguments", "timeout", "output"}, it runs pytest and answers with its exit
status, or null after a timeout. This process imports nothing of dms_jax or pallas_kernels, so each
fork imports their current sources.
"""

import importlib
import json
import os
import signal
import sys
import time
import warnings

import pytest

from tests import conftest

LIBRARIES = (
    "beartype chex flax.nnx grain.python hypothesis jax.experimental.pallas.mosaic_gpu"
    " jax.experimental.pallas.tpu jaxtyping jinja2 numpy optax"
    " orbax.checkpoint rich safetensors.numpy tokenizers tyro xdist"
)
OURS = ("dms_jax", "pallas_kernels")


def run(arguments: list[str], timeout: float, output: str) -> int | None:
    """Runs pytest in a fork."""
    with warnings.catch_warnings(action="ignore"):  # jax warns of forks; it has no threads yet
        child = os.fork()
    if not child:
        os.setsid()
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        os._exit(pytest.main(arguments))
    end = time.monotonic() + timeout
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


def main() -> None:
    conftest.prepare_jax(False, None, None)
    for name in LIBRARIES.split():
        importlib.import_module(name)
    assert not [name for name in sys.modules if name.split(".")[0] in OURS]
    assert len(os.listdir("/proc/self/task")) == 1, "a fork has none of the threads"
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
