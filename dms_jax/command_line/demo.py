"""The demo: retrofit a small model on the spot, then watch a larger one reason from a small cache.

    dms-jax demo
    dms-jax demo --only solve --solve.problems 12
    dms-jax demo --only quickstart --quickstart.sequences 20

The first part (`demos/quickstart.py`) retrofits stories260K and decodes held-out stories under
every cache; in the second (`demos/solve.py`) the shipped reasoning model solves problems with its
whole cache and with its DMS adapter, side by side. They need no accelerator: on two idle CPU cores
the first takes two to three minutes, both about four. An installed wheel downloads the larger model
and its adapter once (23 MB); if it cannot, the second part is skipped.
"""

import dataclasses
from typing import Literal

from dms_jax.command_line.demos import quickstart as stories
from dms_jax.command_line.demos import solve as problems
from dms_jax.command_line.options import shipped
from dms_jax.errors import DataError


@dataclasses.dataclass(frozen=True)
class Config:
    """Run both parts, or one of them."""

    only: Literal["both", "quickstart", "solve"] = "both"
    """Run both parts, or one of them: quickstart retrofits stories260K, solve shows problems
    solved."""
    quickstart: stories.Config = dataclasses.field(default_factory=stories.Config)
    """Settings of the first part, which retrofits stories260K."""
    solve: problems.Config = dataclasses.field(default_factory=problems.Config)
    """Settings of the second part, in which a larger model solves problems."""


def main(config: Config) -> None:
    """Runs the demo."""
    if config.only != "solve":
        stories.main(config.quickstart)
    if config.only == "quickstart":
        return
    try:
        for name in problems.MODELS.values():
            shipped(name)
    except DataError as error:
        if config.only == "solve":
            raise
        print(f"The second part, in which a larger model solves problems, is left out: {error}")
        return
    problems.main(config.solve)
