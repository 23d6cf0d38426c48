"""The plain cache: every token is appended, every query reads them all."""

import dataclasses

from dms_jax.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Vanilla(Policy):
    """No compression. The base class is exactly this."""
