"""The vanilla (uncompressed) cache: appends every token; every query reads all tokens."""

import dataclasses

from dms_jax.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Vanilla(Policy):
    """Keeps and reads every token."""

    @property
    def appends(self) -> bool:
        """See `Policy.appends`: always."""
        return True

    @property
    def can_undo(self) -> bool:
        """See `Policy.can_undo`: always."""
        return True
