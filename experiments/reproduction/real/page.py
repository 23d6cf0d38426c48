"""The page."""

import pathlib

from experiments.reproduction.real.settings import Config


def write_pages(config: Config, folder: pathlib.Path) -> None:
    """Writes README.md."""
    del config, folder
