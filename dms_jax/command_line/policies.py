"""Every cache policy: how it takes a prompt, its options and their defaults.

    dms-jax policies
    dms-jax policies DMS Quest

The other commands take these options after --options.
"""

import dataclasses

import tyro

from dms_jax.command_line import policy_options
from dms_jax.command_line.options import check_names
from dms_jax.policies import POLICIES


@dataclasses.dataclass(frozen=True)
class Config:
    """Show cache policies: how they take a prompt, their options and defaults."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Policies to show, by name; all of them unless given."""


def main(config: Config) -> None:
    """Shows them."""
    check_names("policies", config.names, POLICIES)
    print(policy_options.text(config.names))
