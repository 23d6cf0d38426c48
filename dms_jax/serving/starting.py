"""How the processes of a server start each other: modules of this package, with sockets."""

import os
import socket
import subprocess
import sys

BACKLOG = 2048  # connections that wait to be taken


def start(module: str, *sockets: socket.socket) -> subprocess.Popen[bytes]:
    """Starts a module of this package, whose arguments are the file descriptors of the sockets.

    It finds the packages that this process finds, and has no device. Ctrl-C does not reach it.

    Raises:
      OSError: it cannot be started.
    """
    path = os.pathsep.join(entry for entry in sys.path if entry)
    numbers = [each.fileno() for each in sockets]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", f"dms_jax.serving.{module}", *map(str, numbers)],
        pass_fds=numbers,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"},
        start_new_session=True,
    )
