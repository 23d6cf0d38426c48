"""What a wrong call is."""

import dataclasses
from collections.abc import Callable
from typing import Any

NAN = float("nan")


@dataclasses.dataclass
class Case:
    """A wrong call, the error it must raise, and what the message must say."""

    call: Callable[[], Any]
    error: str
    says: tuple[str, ...]
