"""Models and texts outside the wheel: they are found, fetched and checked, or an error says how."""

import tomllib

import pytest

import dms_jax
from dms_jax import assets
from dms_jax.assets import fetching
from tests.support.tree import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = PROJECT["urls"]["Source"]


def test_listed_hashes_match_the_assets():
    for file, one in fetching.listed().items():
        assert fetching._matches(fetching.OWN / file, one), f"write {file} to fetched.json anew"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As if dms_jax were installed from a wheel, without the excluded files."""
    monkeypatch.setattr(fetching, "OWN", tmp_path / "wheel")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(fetching.VARIABLE, raising=False)
    fetching.listed()  # was read before the files were removed


def test_missing_asset_error_says_how_to_fetch(installed, monkeypatch):
    here = ROOT / "dms_jax" / "assets"
    with pytest.raises(dms_jax.DataError, match=r"22 MB\): dms_jax\.assets\.fetch"):
        assets.path("reasoner-11m")
    for part in (assets.stories, assets.books):
        with pytest.raises(dms_jax.DataError, match=r"dms_jax\.assets\.fetch"):
            part("more" if part is assets.stories else "test")
    with pytest.raises(dms_jax.DataError, match="no asset is called 'gpt5'"):
        assets.path("gpt5")
    monkeypatch.setenv(fetching.VARIABLE, str(here))
    assert assets.path("reasoner-11m") == here / "reasoner-11m"


def test_assets_are_fetched_checked_and_found(installed, tmp_path):
    here = ROOT / "dms_jax" / "assets"
    told = []
    assets.fetch("books", source=str(here), tell=told.append)
    assert assets.path("books") == tmp_path / "cache" / "dms_jax" / "assets" / "books"
    assert len(assets.books("test")) == 2
    assert told[0].startswith("books/")
    assets.fetch("books", source="/nowhere")  # is there already
    with pytest.raises(dms_jax.DataError, match="cannot be fetched"):
        assets.fetch("reasoner-11m", source=str(tmp_path / "nowhere"))
    with pytest.raises(dms_jax.ConfigError, match=r"gpt5: there are books, .*tinystories"):
        assets.fetch("gpt5")


def test_file_of_another_version_is_refused(installed, tmp_path):
    wrong = tmp_path / "there" / "books"
    wrong.mkdir(parents=True)
    for file in fetching.listed():
        (tmp_path / "there" / file).parent.mkdir(exist_ok=True)
        (tmp_path / "there" / file).write_bytes(b"something else")
    with pytest.raises(dms_jax.DataError, match="not the file that this version"):
        assets.fetch("books", source=str(tmp_path / "there"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_files_come_from_the_installed_version():
    host = SOURCE.replace("//github.com", "//raw.githubusercontent.com")
    assert fetching.address() == f"{host}/v{PROJECT['version']}/dms_jax/assets"
