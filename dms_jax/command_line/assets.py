"""Fetch the models and texts that do not come with the wheel.

    dms-jax assets
    dms-jax assets reasoner-11m-dms
    dms-jax assets --source path/to/checkout/dms_jax/assets

A checkout of the repository has them already. What is fetched is checked and kept in
~/.cache/dms_jax, where the library finds it.
"""

import dataclasses
import pathlib

import tyro

from dms_jax import assets


@dataclasses.dataclass(frozen=True)
class Config:
    """Fetch the models and texts that do not come with the wheel."""

    names: tyro.conf.Positional[tuple[str, ...]] = ()
    """reasoner-11m, reasoner-11m-dms, books, tinystories; all unless given."""
    source: str | None = None
    """Folder or address below which the files lie; the project's repository unless given."""
    to: pathlib.Path | None = None
    """Folder to write to; ~/.cache/dms_jax/assets unless given."""


def main(config: Config) -> None:
    """Fetches them."""
    place = assets.fetch(*config.names, source=config.source, to=config.to, tell=print)
    print(f"The assets are in {place}.")
