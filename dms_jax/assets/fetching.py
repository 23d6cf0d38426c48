"""Find assets, and fetch those that are not in the wheel.

Assets are searched for beside this file (a checkout has them all), in the folder of the environment
variable DMS_JAX_ASSETS, and in `cache()`, where `fetch` puts them. `fetch` reads this version's
files from the project's repository (pyproject.toml), or from a given folder or address, and keeps a
file only if its SHA-256 matches `fetched.json`.
"""

import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable

from dms_jax.errors import ConfigError, DataError

OWN = pathlib.Path(__file__).parent
VARIABLE = "DMS_JAX_ASSETS"
SECONDS = 60  # timeout of a connection without data


@functools.cache
def listed() -> dict[str, dict[str, str | int]]:
    """The files that are not in the wheel: {"books/README.md": {"bytes": ..., "sha256": ...}}."""
    return json.loads((OWN / "fetched.json").read_text(encoding="utf-8"))


def cache() -> pathlib.Path:
    """The default folder of `fetch`."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "dms_jax" / "assets"


def find(name: str, holding: str | None = None) -> pathlib.Path | None:
    """The directory of an asset; None if it is not on this machine.

    Args:
      name: name of the asset.
      holding: a file that the directory must contain; by default all files listed in
        `fetched.json`, or the README if there are none.
    """
    wanted = [name for name in [holding] if name] or ["README.md"]
    if holding is None and not (OWN / name / "README.md").is_file():
        wanted = [file.partition("/")[2] for file in listed() if file.startswith(f"{name}/")]
    places = [OWN, cache()]
    if os.environ.get(VARIABLE):
        places.insert(1, pathlib.Path(os.environ[VARIABLE]))
    for place in places:
        if wanted and all((place / name / file).is_file() for file in wanted):
            return place / name
    return None


def missing(name: str) -> str:
    """The error message for an asset that is not on this machine."""
    size = sum(int(one["bytes"]) for file, one in listed().items() if file.startswith(f"{name}/"))
    return (
        f"{name} does not come with the wheel and is not on this machine. Fetch it "
        f"({size / 1e6:.0f} MB): dms_jax.assets.fetch({name!r}). From a "
        f"checkout that is here already: export {VARIABLE}=CHECKOUT/dms_jax/assets."
    )


def address() -> str:
    """The address of this version's assets in the project's repository.

    Raises:
      DataError: dms-jax is not installed, so its address is unknown.
    """
    try:
        about = importlib.metadata.metadata("dms-jax")
    except importlib.metadata.PackageNotFoundError as error:
        raise DataError("dms-jax is not installed; name where its assets lie.") from error
    urls = dict(line.split(", ", 1) for line in about.get_all("Project-URL") or ())
    source = urls["Source"].replace("https://github.com/", "https://raw.githubusercontent.com/")
    return f"{source}/v{about['Version']}/dms_jax/assets"


def fetch(
    *names: str,
    source: str | None = None,
    to: pathlib.Path | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> pathlib.Path:
    """Fetches assets that are not in the wheel, unless they are on this machine already.

    Args:
      names: names of the assets; all by default.
      source: folder or address to read from; by default this version in the project's repository.
      to: folder to write to; `cache()` by default.
      tell: called with a line of text before each file.

    Returns:
      The folder with the assets.

    Raises:
      ConfigError: a name is not that of a fetchable asset.
      DataError: a file cannot be read, or its SHA-256 is wrong.
    """
    known = sorted({file.partition("/")[0] for file in listed()})
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"{', '.join(unknown)}: there are {', '.join(known)} to be fetched.")
    wanted = [file for file in listed() if not names or file.partition("/")[0] in names]
    if to is None:
        to = cache()
        wanted = [file for file in wanted if find(*file.split("/", 1)) is None]
    lacking = [file for file in wanted if not _matches(to / file, listed()[file])]
    if lacking:
        base = address() if source is None else source
        if "://" not in base:
            base = pathlib.Path(base).absolute().as_uri()
        _fetch(lacking, base.rstrip("/"), to, tell)
    return to


def _fetch(files: Iterable[str], base: str, to: pathlib.Path, tell: Callable[[str], None]) -> None:
    for file in files:
        tell(f"{file} ({int(listed()[file]['bytes']) / 1e6:.1f} MB)")
        part = to / f"{file}.{os.getpid()}.part"
        try:
            part.parent.mkdir(parents=True, exist_ok=True)
            with urllib.request.urlopen(f"{base}/{file}", timeout=SECONDS) as answer:
                part.write_bytes(answer.read())
        except (OSError, urllib.error.URLError) as error:
            part.unlink(missing_ok=True)
            raise DataError(
                f"{base}/{file} cannot be fetched to {to}: {error}. Where there is no network, "
                f"copy dms_jax/assets of a checkout and export {VARIABLE} with its place."
            ) from error
        if not _matches(part, listed()[file]):
            part.unlink()
            raise DataError(
                f"{base}/{file} is not the file that this version of dms-jax was made with."
            )
        part.replace(to / file)


def _matches(path: pathlib.Path, one: dict[str, str | int]) -> bool:
    """Whether a file exists with the listed size and SHA-256."""
    if not path.is_file() or path.stat().st_size != one["bytes"]:
        return False
    return hashlib.sha256(path.read_bytes()).hexdigest() == one["sha256"]
