"""Docstrings of the two packages: an entry of Args or Attributes says what the value is."""

import ast
import re

import pytest

from tests.test_architecture import python_files

FRAGMENT = re.compile(r"^\s+[\w, *]+: of ", re.MULTILINE)


@pytest.mark.nightly
def test_no_entry_is_a_fragment():
    fragments = []
    for path in [*python_files("dms_jax/evaluation"), *python_files("dms_jax/analysis")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found = FRAGMENT.findall(ast.get_docstring(node, clean=False) or "")
                fragments += [f"{path.name}: {each.strip()}" for each in found]
    assert not fragments
