"""What tells the documents of a source from others: a digest of their number and of some of them.

A run that is resumed with other data would be neither of the two runs, so the fingerprint is among
the settings that must agree. It depends on the documents alone: a file may have moved.
"""

import dataclasses
import hashlib
import json
from typing import Any

import numpy as np

from dms_jax.data.sources import Source

# Documents that are read, evenly spaced, with the first and the last.
_SAMPLED = 1024


def fingerprint(source: Source) -> str:
    """Returns the digest of a source.

    What it reads is not malformed, so that a line which stops a run later on can be mended in its
    place: the data stay the same to the fingerprint.

    Raises:
      DataError: a document that is read is malformed.
    """
    count = len(source)
    digest = hashlib.sha256(f"{count}".encode())
    for index in sorted({round(at) for at in np.linspace(0, count - 1, min(count, _SAMPLED))}):
        text = json.dumps(source[index], default=_plain, sort_keys=True)
        digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """Returns JSON data of what JSON has no form for."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else repr(value)
