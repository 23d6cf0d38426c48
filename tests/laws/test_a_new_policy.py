"""The laws hold for the example policy printed in CONTRIBUTING.md.

The last test follows the page's instructions in a copy of the tree, and runs its commands.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from dms_jax import policies
from tests.laws.expected import SPLITS
from tests.laws.rows import Row
from tests.laws.test_layers import check_run, parts_of
from tests.oracles import scored
from tests.support.instances import further
from tests.support.tree import copy_tree

PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"


def block_with(text: str) -> str:
    """Returns the one code block of the page that contains the text, dedented."""
    fenced = r"^ *```\w*\n(.*?)^ *```$"
    blocks = re.findall(fenced, PAGE.read_text(), flags=re.DOTALL | re.MULTILINE)
    (block,) = [block for block in map(textwrap.dedent, blocks) if text in f"\n{block}"]
    return block


@pytest.fixture(scope="module")
def source() -> str:
    return block_with("class SinkDistance")


@pytest.fixture(scope="module")
def kind(source, tmp_path_factory):
    path = tmp_path_factory.mktemp("added") / "sink_distance.py"
    path.write_text(source)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    exec(block_with("def sink_distance"), dict(vars(scored)))
    yield module.SinkDistance
    del scored.RANKINGS["SinkDistance"], sys.modules[path.stem]


@pytest.mark.parametrize("inside", [False, *further(True)], ids=["alone", "in AdaKV"])
def test_prompts_and_answers(kind, inside):
    policy = kind(**scored.RANKINGS[kind.name].options[0])
    policy = policies.AdaKV(policy, alpha=0.3) if inside else policy
    row = Row(policy, group=2, page_size=4, answers="chunks")
    check_run(row, SPLITS[1], parts_of(row, SPLITS[1], seed=3))


def insert(path: Path, after: str, text: str) -> None:
    """Inserts lines after the one line of a file equal to `after`, indented as the next line."""
    lines = path.read_text().splitlines(keepends=True)
    (place,) = [index for index, line in enumerate(lines, 1) if line.strip() == after]
    margin = re.match(" *", lines[place]).group()
    lines[place:place] = textwrap.indent(text, margin)
    path.write_text("".join(lines))


@pytest.mark.nightly
def test_documented_policy_works(source, tmp_path):
    """About 30 seconds."""
    copy_tree(tmp_path)
    with (tmp_path / "tests" / "oracles" / "scored.py").open("a") as file:
        file.write("\n\n" + block_with("def sink_distance"))
    folder = tmp_path / "dms_jax" / "policies"
    (folder / "sink_distance.py").write_text(source)
    own_module = "from dms_jax.policies.sink_distance import SinkDistance\n"
    insert(folder / "__init__.py", "from dms_jax.policies.base import Policy", own_module)
    insert(folder / "__init__.py", "__all__ = [  # noqa: RUF022", '"SinkDistance",\n')

    _, _, _, *tests = shlex.split(block_with('-k "test_policies or leaves'))
    assert tests[:2] == ["-n", "0"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
