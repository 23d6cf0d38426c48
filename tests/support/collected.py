"""A plugin that writes what pytest collected, one JSON line for each test instance, and runs none.

    python -m pytest --collect-only -p tests.support.collected --collected-to FILE tests/laws

A line holds the test's function, whether the instance is `slow`, and the families that it is of:
the policy of its parameters, a kernel's form, the dtypes of a kernel's case.
"""

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--collected-to", type=Path, help="a file for the lines")


def families(name: str, value: Any) -> list[str]:
    """Returns the families of an instance that the value of one of its parameters tells."""
    from dms_jax.policies import POLICIES, Policy  # jax is set up first, by tests/conftest.py

    policy = getattr(value, "policy", value)
    if isinstance(policy, type) and issubclass(policy, Policy):
        return [policy.__name__]
    if isinstance(policy, Policy):
        return [type(policy).__name__]
    if isinstance(value, str) and value in POLICIES:
        return [value]
    if name == "implementation" and isinstance(value, str):
        return [value]
    if dtype := getattr(value, "dtype", None):
        return [f"{dtype} in pages of {getattr(value, 'pages_dtype', None) or dtype}"]
    return []


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    lines = []
    for item in items:
        if item.get_closest_marker("gpu"):
            continue  # runs where there is a card alone
        given = item.callspec.params.items() if hasattr(item, "callspec") else ()
        lines.append(
            {
                "test": item.nodeid.partition("[")[0],
                "slow": item.get_closest_marker("nightly") is not None,
                "families": [family for one in given for family in families(*one)],
            }
        )
    text = "".join(json.dumps(line) + "\n" for line in lines)
    config.getoption("--collected-to").write_text(text)
