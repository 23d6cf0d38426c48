"""The documentation page of the engine lists the files of a call."""

import pathlib
import re
import sys

import pytest

import dms_jax
from dms_jax import generation
from tests.generation.support import model_for
from tests.support.tree import ROOT

PAGE = ROOT / "experiments" / "docs" / "pages" / "engine.md"


@pytest.mark.usefixtures("fakes")
def test_engine_page_lists_files_of_a_call():
    model, entered = model_for("vanilla"), []
    folder = pathlib.Path(generation.__file__).parent

    def note(frame, event, _):
        path = pathlib.Path(frame.f_code.co_filename)
        if event == "call" and path.parent == folder and path.name not in entered:
            entered.append(path.name)

    sampling = dms_jax.Sampling(temperature=0, max_new_tokens=9)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        dms_jax.generate(model, [[1, 70, 90]], policy=dms_jax.TOVA(budget=16), sampling=sampling)
    finally:
        sys.setprofile(before)
    named = re.findall(r"^\| `(\w+\.py)` \|", PAGE.read_text(), re.MULTILINE)
    assert sorted(entered) == sorted(named)
