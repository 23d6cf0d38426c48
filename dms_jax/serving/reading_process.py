"""The process that reads large bodies: `reading.Reader` starts it, with a socket that it inherits.

    python -m dms_jax.serving.reading_process SOCKET        (its file descriptor)

It is told first what is served, and then answers each `Body` with an `Ask` or an error. It ends
when the other side has gone, or kills it.
"""

import logging
import signal
import socket
import sys

from dms_jax.errors import DmsJaxError
from dms_jax.serving.messages import packed, portable, read
from dms_jax.serving.protocol import Ask
from dms_jax.serving.reading import SECONDS, Body

_logger = logging.getLogger("dms_jax")


def main() -> None:
    """Reads what comes through the socket of the command line."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as connection:
        stream = connection.makefile("rb")
        served = read(stream)
        while (body := read(stream)) is not None:
            # The other side kills this process after the time limit; the alarm is for a dead one.
            signal.setitimer(signal.ITIMER_REAL, 2 * SECONDS)
            answer = packed(_read(body, served))
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.sendall(answer)


def _read(body: Body, served: object) -> Ask | Exception:
    try:
        return body.read(served)  # pyright: ignore[reportArgumentType]
    except Exception as error:
        if not isinstance(error, DmsJaxError):
            _logger.exception("A request failed.")
        return portable(error)


if __name__ == "__main__":
    main()
