"""Two replicas of the server under load, where Ray is installed."""

import json
import os
import re
import subprocess
import sys

import pytest

from tests.support.tree import ROOT


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_killed_replica_loses_only_its_own_streams(tmp_path):
    pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'ray[serve]>=2.60'")
    script = [sys.executable, "-m", "experiments.benchmarks.replicas"]
    own = {name: v for name, v in os.environ.items() if not re.match("JAX_|XLA_|DMS_JAX_", name)}
    done = subprocess.run(
        [*script, "--out", str(tmp_path / "figures.json"), "--before", "12"],
        cwd=ROOT,
        env=own | {"JAX_PLATFORMS": "cpu", "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads((tmp_path / "figures.json").read_text())
    killed, changed = figures["killed"], figures["changed"]
    assert killed["ends"].keys() <= {"whole", "told"}
    assert 0 < killed["ends"]["told"] <= killed["held_by_the_killed"]
    assert killed["lost_of_others"] == 0
    assert changed["ends"].keys() == {"whole"}
    assert changed["of_the_first"] > 0
    assert changed["of_the_second"] > 0
