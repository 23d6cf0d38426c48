"""What is built and published: the wheel, what it leaves out, extras, addresses, version."""

import importlib.metadata
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

import dms_jax
from dms_jax import assets
from dms_jax.assets import fetching
from tests.test_architecture import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SOURCE = PROJECT["urls"]["Source"]
LARGEST_WHEEL = 3_000_000  # bytes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, open."""
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (path,) = folder.glob("*.whl")
    assert path.stat().st_size < LARGEST_WHEEL
    with zipfile.ZipFile(path) as opened:
        yield opened


def test_the_wheel_holds_both_packages_and_says_that_they_are_typed(wheel):
    names = wheel.namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {
        "dms_jax",
        "pallas_kernels",
    }
    for package in ("dms_jax", "pallas_kernels"):
        assert f"{package}/py.typed" in names


def test_the_wheel_has_a_command_and_addresses(wheel):
    names = wheel.namelist()
    (entries,) = (name for name in names if name.endswith("entry_points.txt"))
    assert "dms-jax = dms_jax.command_line:main" in wheel.read(entries).decode()
    (metadata,) = (name for name in names if name.endswith("METADATA"))
    about = wheel.read(metadata).decode()
    for label in ("Source", "Documentation", "Issues", "Changelog"):
        assert f"Project-URL: {label}, {PROJECT['urls'][label]}" in about


def test_the_wheel_leaves_out_what_is_fetched_and_nothing_else(wheel):
    inside = {
        name.removeprefix("dms_jax/assets/")
        for name in wheel.namelist()
        if name.startswith("dms_jax/assets/")
    }
    lies = subprocess.run(
        ["git", "ls-files", "."], cwd=fetching.OWN, capture_output=True, text=True, check=True
    )
    assert inside | set(fetching.listed()) == set(lies.stdout.split())
    assert not inside & set(fetching.listed())


def test_what_is_fetched_is_what_lies_here():
    for file, one in fetching.listed().items():
        assert fetching._is_that(fetching.OWN / file, one), f"write {file} to fetched.json anew"


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """As if dms_jax had come from a wheel: without what it leaves out."""
    monkeypatch.setattr(fetching, "OWN", tmp_path / "wheel")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(fetching.VARIABLE, raising=False)
    fetching.listed()  # was read before the files went


def test_an_asset_that_is_not_here_says_how_to_get_it(installed, monkeypatch):
    here = ROOT / "dms_jax" / "assets"
    with pytest.raises(dms_jax.DataError, match=r"22 MB\): dms-jax assets reasoner-11m"):
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


def test_another_file_than_the_one_of_this_version_is_refused(installed, tmp_path):
    wrong = tmp_path / "there" / "books"
    wrong.mkdir(parents=True)
    for file in fetching.listed():
        (tmp_path / "there" / file).parent.mkdir(exist_ok=True)
        (tmp_path / "there" / file).write_bytes(b"something else")
    with pytest.raises(dms_jax.DataError, match="not the file that this version"):
        assets.fetch("books", source=str(tmp_path / "there"))
    assert not [path for path in (tmp_path / "cache").rglob("*") if path.is_file()]


def test_files_are_fetched_from_this_version_of_the_project():
    host = SOURCE.replace("//github.com", "//raw.githubusercontent.com")
    if "Project-URL" not in importlib.metadata.metadata("dms-jax"):
        pytest.skip("installed before the project had addresses: run make install again")
    assert fetching.address() == f"{host}/v{PROJECT['version']}/dms_jax/assets"


def test_the_address_of_the_project_is_the_same_everywhere():
    lies = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    named = re.compile(
        r"https://(?:github\.com|colab\.research\.google\.com/github)/([\w-]+/dms_jax)"
    )
    found = {}
    for name in lies.stdout.split():
        if name.endswith((".md", ".toml", ".yml", ".cff", ".ipynb", ".py")):
            for owner in named.findall((ROOT / name).read_text(encoding="utf-8")):
                found.setdefault(owner, []).append(name)
    assert list(found) == [SOURCE.removeprefix("https://github.com/")]


def test_version_and_licence_are_said_alike():
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"version: {PROJECT['version']}\n" in citation
    assert f"license: {PROJECT['license']}\n" in citation
    assert f"repository-code: {SOURCE}\n" in citation
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_every_extra_is_used_and_what_a_text_installs_there_is():
    extras = PROJECT["optional-dependencies"]
    texts = [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "experiments/docs").rglob("*.md"),
    ]
    told = "".join(path.read_text(encoding="utf-8") for path in texts)
    named = {
        extra
        for found in re.findall(r"(?:dms-jax|'\.|install \.|\s\.)\[([\w,]+)\]", told)
        for extra in found.split(",")
    }
    assert named <= set(extras)
    assert set(extras) - {"dev"} <= named


def test_extras_are_added_to_the_editable_install():
    said = subprocess.run(
        ["make", "-n", "install", "EXTRAS=cuda,eval"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "sh .ci/install .venv cuda,eval" in said
    script = (ROOT / ".ci" / "install").read_text()
    assert script.count('--editable ".[$extras]"') == 2
