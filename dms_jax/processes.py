"""Several processes of one program, on one host or many: connecting and agreeing.

`connect` detects from the environment whether this process is one of several, and joins the others.
It reads:

    SLURM        `srun`: SLURM_STEP_NUM_TASKS above 1
    Open MPI     `mpirun`: OMPI_COMM_WORLD_SIZE above 1
    TPU, GKE     TPU_WORKER_HOSTNAMES names several, or MEGASCALE_NUM_SLICES is above 1
    TPU, GCE     the machine's metadata name several endpoints
    any other    JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and JAX_PROCESS_ID (of an indexed
                 job of Kubernetes JOB_COMPLETION_INDEX; under XPK NNODES and NODE_RANK)

Processes agree through jax's coordination service, over the hosts' network, never through the
devices: a collective would wait for all steps in flight, and forever if a process has failed.
"""

import functools
import itertools
import os
import pathlib
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # no public API for the coordination service's client
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from dms_jax.errors import ConfigError, OtherProcessError, plain

# Processes that compile or evaluate may reach an agreement minutes apart.
LONGEST_WAIT_SECONDS = 3600
# How long a failed process waits until the others know.
_FAREWELL_SECONDS = 60
# Timeout of the shutdown after a process is gone.
_SHUTDOWN_SECONDS = 60
_METADATA = "http://metadata.google.internal/computeMetadata/v1/instance/attributes/"
_TPU_DEVICES = (pathlib.Path("/dev/accel0"), pathlib.Path("/dev/vfio/0"))

# Attribute of an error that the other processes know.
_TOLD = "_told_to_other_processes"

_agreements = itertools.count()


def connect(
    coordinator: str | None = None, count: int | None = None, index: int | None = None
) -> bool:
    """Joins the processes of this program, if there are several; returns whether there are.

    Call it before the first use of jax; a second call does nothing.

    Args:
      coordinator: host:port of process 0, if the environment does not name it.
      count: number of processes.
      index: number of this process, from 0.

    Raises:
      ConfigError: the environment is incomplete, or the others cannot be reached.
    """
    if jax.distributed.is_initialized():
        return several()
    given = dict(coordinator_address=coordinator, num_processes=count, process_id=index)
    if any(value is not None for value in given.values()):
        missing = [name for name, value in given.items() if value is None]
        if missing:
            raise ConfigError(
                "Processes are connected by coordinator, count and index together; "
                f"{', '.join(missing)} is missing."
            )
        found: dict[str, Any] | None = given if count != 1 else None
    else:
        found = arguments(os.environ)
    if found is None:
        return False
    try:
        jax.distributed.initialize(**found, shutdown_timeout_seconds=_SHUTDOWN_SECONDS)
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"The processes of this run cannot be connected ({found or 'TPU'}): {plain(error, 400)}"
        ) from error
    return several()


def arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """Returns the arguments of `jax.distributed.initialize`; None for a single process.

    Raises:
      ConfigError: a variable is missing, or is no number.
    """

    def number(*names: str) -> int | None:
        for name in names:
            if name in environment:
                try:
                    return int(environment[name])
                except ValueError as error:
                    raise ConfigError(
                        f"{name} must be a whole number, got {environment[name]!r}."
                    ) from error
        return None

    address = environment.get("JAX_COORDINATOR_ADDRESS")
    if address:
        count = number("JAX_NUM_PROCESSES", "NNODES", "SLURM_STEP_NUM_TASKS")
        count = number("OMPI_COMM_WORLD_SIZE") if count is None else count
        index = number("JAX_PROCESS_ID", "NODE_RANK", "JOB_COMPLETION_INDEX", "SLURM_PROCID")
        index = number("OMPI_COMM_WORLD_RANK") if index is None else index
        if count is None or index is None:
            raise ConfigError(
                "JAX_COORDINATOR_ADDRESS is set, so JAX_NUM_PROCESSES and JAX_PROCESS_ID must "
                "give the number of processes and the index of this one."
            )
        if count == 1:
            return None
        return dict(coordinator_address=address, num_processes=count, process_id=index)
    # The step's tasks, not the job's: in an allocation without srun a process is alone.
    if (number("SLURM_STEP_NUM_TASKS") or 1) > 1:
        found: dict[str, Any] = dict(num_processes=number("SLURM_STEP_NUM_TASKS"))
        gpus = number("SLURM_GPUS_ON_NODE") or 1
        if gpus > 1 and environment.get("SLURM_STEP_TASKS_PER_NODE", "").split("(")[0] == "1":
            found["local_device_ids"] = list(range(gpus))  # otherwise jax takes one GPU per process
        return found
    if (number("OMPI_COMM_WORLD_SIZE") or 1) > 1:
        return dict(cluster_detection_method="ompi")
    hosts = environment.get("TPU_WORKER_HOSTNAMES", "").split(",")
    if len(hosts) > 1 or (number("MEGASCALE_NUM_SLICES") or 1) > 1:
        return {}
    if not environment.get("TPU_SKIP_MDS_QUERY") and len(_tpu_endpoints()) > 1:
        return {}
    return None


def _tpu_endpoints() -> list[str]:
    """Returns the hosts of this machine's TPU slice, from its metadata."""
    if not any(device.exists() for device in _TPU_DEVICES):
        return []
    request = urllib.request.Request(
        _METADATA + "worker-network-endpoints", headers={"Metadata-Flavor": "Google"}
    )
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.read().decode().split(",")
    except (urllib.error.URLError, OSError):  # not a Google machine (Colab's is one)
        return []


def several() -> bool:
    """Whether this process is one of several."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this is process 0, which writes and prints for all."""
    return jax.process_index() == 0


def check_mesh(mesh: jax.sharding.Mesh | None) -> None:
    """Raises ConfigError if the mesh includes no device of some process."""
    taking_part = set() if mesh is None else {each.process_index for each in mesh.devices.flat}
    left = sorted(set(range(jax.process_count())) - taking_part)
    if several() and left:
        raise ConfigError(
            f"{jax.process_count()} processes train on one mesh over their {jax.device_count()} "
            f"devices, and this one has none of process {', '.join(map(str, left))}. Give "
            f"mesh=make_mesh(...) of {jax.device_count()} devices (--data-shards all)."
        )


class Agreement:
    """Joint decisions of all processes, made in the same order in each.

    If one process fails, the others raise at their next agreement instead of waiting for it.
    """

    def __init__(self):
        self._name = f"dms_jax/{next(_agreements)}"
        self._round = 0

    def __call__(self, *wishes: bool, seconds: int = LONGEST_WAIT_SECONDS) -> tuple[bool, ...]:
        """Returns for each wish whether any process has it.

        Raises:
          OtherProcessError: another process failed.
        """
        if not several():
            return wishes
        told = self._exchange("".join("1" if wish else "0" for wish in wishes), seconds)
        return tuple(any(each[at] == "1" for each in told.values()) for at in range(len(wishes)))

    def fail(self, error: BaseException, seconds: int = _FAREWELL_SECONDS) -> None:
        """Tells the other processes that this one failed.

        An error that they know from another agreement is not sent again.

        Args:
          error: the error.
          seconds: how long to wait for the others.
        """
        if several() and not isinstance(error, OtherProcessError) and _TOLD not in vars(error):
            vars(error)[_TOLD] = True
            what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            try:
                self._exchange(f"!{plain(what, 2000)}", seconds)
            except (OtherProcessError, RuntimeError):  # they failed too, or are gone
                return

    def first_done(self, error: BaseException | None) -> None:
        """Waits for all processes; raises in the others if process 0 failed.

        Args:
          error: the error of process 0, which its caller raises.
        """
        if error is not None:
            self.fail(error)
        elif several():
            self._exchange("-")

    def _exchange(self, text: str, seconds: int = LONGEST_WAIT_SECONDS) -> dict[int, str]:
        """Returns the texts of all processes; a text of zeros is not sent."""
        name, self._round = f"{self._name}/{self._round}", self._round + 1
        client: Any = distributed.global_state.client
        silent = not text.strip("0-")
        if not silent:
            client.key_value_set(f"{name}/{jax.process_index()}", text)
        client.wait_at_barrier(self._name, 1000 * seconds)
        found = client.key_value_dir_get(f"{name}/")
        told = {int(key.rpartition("/")[2]): value for key, value in found}
        for process, value in told.items():
            if value.startswith("!") and process != jax.process_index():
                raise OtherProcessError(f"Process {process} of this run failed: {value[1:]}")
        return told


def gather(text: str) -> list[str]:
    """Returns the texts of all processes, by process."""
    if not several():
        return [text]
    content = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(content.size))
    padded = np.zeros(max(1, int(sizes.max())), np.uint8)
    padded[: content.size] = content
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def put(value: np.ndarray, place: Any) -> jax.Array:
    """Places an array that every process has; each process transfers its devices' part.

    `jax.device_put` would first compare the array between processes, after the work in flight.
    """
    if place is None or place.is_fully_addressable:
        return jax.device_put(value, place)
    return jax.make_array_from_callback(value.shape, place, lambda index: value[index])


def is_here(value: jax.Array | np.ndarray) -> bool:
    """Whether this process can read the whole array alone."""
    return isinstance(value, np.ndarray) or value.is_fully_addressable or value.is_fully_replicated


def to_host(value: jax.Array | np.ndarray) -> np.ndarray:
    """Copies an array to the host without caching the copy.

    `jax.device_get` caches it for the lifetime of the array, and frozen parameters live long.
    """
    if isinstance(value, np.ndarray):
        return value
    shards = [shard.data for shard in value.addressable_shards]
    again = jax.make_array_from_single_device_arrays(value.shape, value.sharding, shards)
    return jax.device_get(again)


def parts(
    asked: Iterable[tuple[jax.Array | np.ndarray, int | None]],
) -> Iterator[np.ndarray | None]:
    """Yields parts of arrays on the host, in the first process; None in the others.

    All processes gather an array that is spread over them, so they must ask for the same parts in
    the same order.

    Args:
      asked: (array, index along its first axis or None for all of it).
    """
    here, last, wanted = None, None, is_first()
    for value, at in asked:
        if not is_here(value):
            part = _gather(value.sharding.mesh)(value, at).addressable_data(0)  # pyright: ignore
            part.block_until_ready()  # otherwise unwanted parts would pile up on the devices
            yield np.asarray(part) if wanted else None
            continue
        if wanted and value is not last:
            here, last = None, value  # avoids two arrays on the host
            here = to_host(value)
        yield (here if at is None else here[at]) if wanted and here is not None else None


@functools.cache
def _gather(mesh: jax.sharding.Mesh) -> Any:
    """Returns a program that gathers a part of an array on every device of a mesh."""
    everywhere = NamedSharding(mesh, PartitionSpec())

    def take(x: jax.Array, at: int | None) -> jax.Array:
        return x if at is None else jax.lax.dynamic_index_in_dim(x, at, keepdims=False)

    return jax.jit(take, out_shardings=everywhere)
