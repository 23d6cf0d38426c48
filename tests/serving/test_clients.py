"""The clients that people have, unchanged, against answers from a script.

They are programs of their own (`tests/serving/clients`), with packages that `make clients` fetches.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from tests.serving.scripted import scripted
from tests.serving.test_apis import weather
from tests.support.tree import ROOT

PROGRAMS = pathlib.Path(__file__).parent / "clients"
PACKAGES = ROOT / os.environ.get("CLIENTS", ".clients")

pytestmark = pytest.mark.nightly


def script(text):
    return '{"city": "Paris", "degrees": 21}' if "As JSON." in text else weather(text)


def ask(program, *command, **environment):
    with scripted("hermes", script) as client:
        done = subprocess.run(
            [*command, str(PROGRAMS / program), client.address],
            env=os.environ | environment,
            cwd=PACKAGES / "node",
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done\n"


@pytest.fixture(autouse=True)
def _packages():
    if not (PACKAGES / "installed").exists():
        pytest.skip("the clients are not there: `make clients`")


@pytest.mark.parametrize("name", ["openai", "anthropic", "agents"])
def test_clients_for_python(name):
    ask(f"{name}_client.py", sys.executable, PYTHONPATH=str(PACKAGES / "python"))


def test_openai_s_client_for_javascript(tmp_path):
    """Node looks for packages beside the program, which is copied to them."""
    if (node := shutil.which("node")) is None:
        pytest.skip("node is not installed")
    copied = PACKAGES / "node" / "openai_client.mjs"
    shutil.copyfile(PROGRAMS / "openai_client.mjs", copied)
    ask(copied, node)
