"""List the cache policies, or explain some of them with their options.

    dms-jax policies
    dms-jax policies DMS Quest

The other commands take these options after --options.
"""

import dataclasses

import tyro
from rich import box
from rich.console import Console
from rich.table import Table

from dms_jax.command_line import policy_options
from dms_jax.command_line.options import check_names
from dms_jax.policies import POLICIES
from dms_jax.policies.selective import SelectiveReading
from dms_jax.policies.vanilla import Vanilla

WIDTH = 80

START = """\
Start with TOVA, which needs no training: --policy TOVA --options budget=1024.
A policy marked "trained" needs a checkpoint or an adapter retrofitted for it.
dms-jax policies NAME explains one with all of its options."""


@dataclasses.dataclass(frozen=True)
class Config:
    """List the cache policies, or explain some of them with their options."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """Policies to explain, by name; by default a table of all policies."""


def main(config: Config) -> None:
    """Prints the table or the explanations."""
    check_names("policies", config.names, POLICIES)
    if config.names:
        print(policy_options.text(config.names))
        return
    Console(width=WIDTH, highlight=False).print(table())
    print(START)


def table() -> Table:
    """Returns a table of policies: saving, training, and description."""
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for name in ("policy", "saves", "trained", "does"):
        shown.add_column(name, no_wrap=name != "does")
    for policy in policy_options.described():
        kind = POLICIES[policy.name]
        saves = "reads" if issubclass(kind, SelectiveReading) else "memory"
        trained = "trained" if kind().retrofit.needed else ""
        saves = "" if kind is Vanilla else saves
        shown.add_row(policy.name, saves, trained, policy.does.removesuffix("."))
    return shown
