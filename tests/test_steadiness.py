"""The suite under other seeds and compilers: what is shifted, and that each failure is a line."""

import chex
import jax
import numpy as np
import pytest

from tests import steadiness
from tests.support.reseeding import Reseeding

REPORT = """<testsuites><testsuite>
<testcase classname="tests.cache.test_pages" name="test_a"/>
<testcase classname="tests.cache.test_pages" name="test_b[1]"><failure message="0.39 &gt; 0.4"/>
</testcase>
<testcase classname="tests.cache.test_pool" name="test_c"><error message="no file"/></testcase>
<testcase classname="tests.cache.test_pool" name="test_d"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def reseeding(monkeypatch):
    monkeypatch.setattr(np.random, "default_rng", np.random.default_rng)
    monkeypatch.setattr(jax.random, "key", jax.random.key)
    return Reseeding(2)


@pytest.mark.own_seeds("compares streams by name")
def test_seeds_of_the_checkout_are_shifted(reseeding):
    seeds = (7, [7, 8], np.uint32(7))
    before = [np.random.default_rng(seed).normal() for seed in seeds]
    key = jax.random.key(7)
    reseeding.install()
    after = [np.random.default_rng(seed).normal() for seed in seeds]
    assert not set(before) & set(after)
    assert after == [np.random.default_rng(seed).normal() for seed in seeds]
    assert jax.random.key(7) != key
    chex.assert_trees_all_equal(jax.random.key(7), jax.jit(lambda seed: jax.random.key(seed))(7))
    # Programs of other packages draw as before, and so do tests that have seeds of their own.
    names = {"draw": np.random.default_rng}
    exec(compile("found = draw(7).normal()", "/usr/lib/other.py", "exec"), names)
    assert names["found"] == before[0]
    reseeding.active = False
    assert np.random.default_rng(7).normal() == before[0]


def test_each_failure_is_a_line(tmp_path):
    (tmp_path / "sse4.xml").write_text(REPORT)
    assert steadiness.failures("sse4", tmp_path / "sse4.xml", 1) == [
        {
            "variation": "sse4",
            "test": "tests.cache.test_pages::test_b[1]",
            "kind": "failure",
            "message": "0.39 > 0.4",
        },
        {
            "variation": "sse4",
            "test": "tests.cache.test_pool::test_c",
            "kind": "error",
            "message": "no file",
        },
    ]
    (crashed,) = steadiness.failures("sse4", tmp_path / "none.xml", 3)
    assert crashed["test"] is None
    assert crashed["message"] == "pytest ended with status 3"


def test_a_variation_names_its_environment(tmp_path):
    arguments, environment = steadiness.command("optimized", 4, tmp_path, ["-k", "pages"])
    assert environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "0"
    assert environment["XLA_FLAGS"] == ""
    assert arguments[-2:] == ["-k", "pages"]
    assert "--reseed" not in arguments
    arguments, environment = steadiness.command("reseed-17", 4, tmp_path, [])
    assert arguments[-2:] == ["--reseed", "17"]
    assert environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    with pytest.raises(SystemExit, match="there is no variation 'slow'; there are as-is, reseed-1"):
        steadiness.variation("slow")
