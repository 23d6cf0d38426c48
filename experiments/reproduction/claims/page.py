"""The page."""

import pathlib

from experiments.reproduction.claims.plan import Config


def write_pages(config: Config, folder: pathlib.Path) -> None:
    """Nothing yet."""
