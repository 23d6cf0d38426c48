"""What is built and published: the wheel, what it leaves out, extras, addresses, version."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile

import pytest

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
        for found in re.findall(r"(?:dms-jax|['`\s]\.)\[([\w,]+)\]", told)
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


def test_a_gpu_compiler_that_cannot_be_fetched_stops_no_other_test(tmp_path):
    """There is none for some platforms, and its one test is skipped without it."""
    make = tmp_path / "make"
    make.write_text('#!/bin/sh\necho "made $1"\n[ "$1" != "$FAILS" ]\n')
    make.chmod(0o755)

    def run(fails):
        environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FAILS": fails}
        command = ["sh", str(ROOT / ".ci" / "run")]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    done = run("gpu-compiler")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[1::2] == ["gpu-compiler", "test-all", "lint", "newest"]
    assert "its test is skipped" in done.stderr
    assert run("test-all").returncode
    cleaned = subprocess.run(["make", "-n", "clean"], cwd=ROOT, capture_output=True, text=True)
    assert ".gpu_compiler" in cleaned.stdout


def test_the_gpu_compiler_is_installed_by_uv_where_it_made_the_environment(tmp_path):
    """An environment of uv has no pip."""
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    for name in ("requirements.lock", "pyproject.toml", ".venv/bin/python", "bin/uv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text('#!/bin/sh\n[ "$1" = -c ] && echo plugin==1\n')
        (tmp_path / name).chmod(0o755)
    (tmp_path / "bin/uv").write_text('#!/bin/sh\necho "$@"\nmkdir -p .gpu_compiler\n')
    (tmp_path / ".venv/installed").touch()
    done = subprocess.run(
        ["make", "-s", "gpu-compiler"],
        cwd=tmp_path,
        env=os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("pip install --python .venv/bin/python ")
    assert "--target .gpu_compiler plugin==1" in done.stdout
