"""What the processes of a server say to each other, over one connected pair of sockets.

    HTTP to engine     Submit, Cancel, Look
    engine to HTTP     Served (first of all), Reply, News, End

A message is its length in eight bytes and then its pickle; those of a direction keep their order. A
side that has gone is the end of the stream.
"""

import asyncio
import dataclasses
import pickle
import struct
from typing import Any, BinaryIO

from dms_jax.config import ModelConfig
from dms_jax.errors import DmsJaxError
from dms_jax.generation import Sampling
from dms_jax.serving.access import Access
from dms_jax.serving.service import Figures, Piece, Service

LENGTH = struct.Struct("!Q")


@dataclasses.dataclass(frozen=True)
class Served:
    """What HTTP must know of the model behind it.

    Attributes:
      name: of the model, as clients give it.
      policy: name of the cache policy.
      config: of the model.
      tokenizer: of the model, with its chat template; None if it has none.
      max_tokens: the most tokens of a request, prompt and answer.
      most: the most answers that can run or wait.
      defaults: of requests that do not say how to draw.
      seed: of the seeds that requests get which give none.
      access: who may ask.
    """

    name: str
    policy: str
    config: ModelConfig
    tokenizer: Any
    max_tokens: int
    most: int
    defaults: Sampling
    seed: int
    access: Access = dataclasses.field(default_factory=Access)

    @classmethod
    def of(
        cls,
        service: Service,
        name: str,
        defaults: Sampling,
        seed: int,
        access: Access | None = None,
    ) -> "Served":
        """What a service serves, under a name."""
        model = service.engine.model
        return cls(
            name=name,
            policy=service.engine.policy.name,
            config=model.config,
            tokenizer=model.tokenizer,
            max_tokens=service.max_tokens,
            most=service.most,
            defaults=defaults,
            seed=seed,
            access=Access() if access is None else access,
        )


@dataclasses.dataclass(frozen=True)
class Submit:
    """Asks for answers; the `Reply` is None, or the error that refuses them.

    Attributes:
      key: a number that the asking side gives, for all that belongs to it.
      prompts, sampling: see `Service.submit`.
    """

    key: int
    prompts: list[list[int]]
    sampling: Sampling


@dataclasses.dataclass(frozen=True)
class Cancel:
    """Ends what was submitted under a key, as far as it has not ended; there is no reply."""

    key: int


@dataclasses.dataclass(frozen=True)
class Look:
    """Asks for the `State`."""

    key: int


@dataclasses.dataclass(frozen=True)
class State:
    """How the engine is.

    Attributes:
      figures, waiting, draining, alive: see `Service`.
    """

    figures: Figures
    waiting: int
    draining: bool
    alive: bool


@dataclasses.dataclass(frozen=True)
class Reply:
    """The reply to what was asked under a key."""

    key: int
    value: State | Exception | None


@dataclasses.dataclass(frozen=True)
class News:
    """The pieces and errors of a chunk, of all that was submitted, each with its key."""

    pieces: list[tuple[int, Piece | Exception]]


@dataclasses.dataclass(frozen=True)
class End:
    """HTTP is to end: it takes no more connections, and ends with the answers that run."""


def packed(message: Any) -> bytes:
    """Returns a message as it is sent."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(data)) + data


def read(stream: BinaryIO) -> Any:
    """Returns the next message of a stream; None at its end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    data = stream.read(length)
    return pickle.loads(data) if len(data) == length else None


async def next_message(reader: asyncio.StreamReader) -> Any:
    """Returns the next message of a stream.

    Raises:
      EOFError: there are no more.
    """
    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
    return pickle.loads(await reader.readexactly(length))


def portable(error: Exception) -> Exception:
    """Returns an error that another process can read: itself, or its words if they are all it can.

    Errors of this library always can.
    """
    if isinstance(error, DmsJaxError):
        return error
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the class of the error does
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
