"""Tokenizers in every published layout, against what transformers reads from them."""

import functools
import json
import pathlib
import warnings
from typing import Any

import pytest

from dms_jax.checkpoint import Tokenizer
from tests.checkpoint import tokenizer_layouts as layouts


@functools.cache
def recorded(version: int) -> dict[str, Any]:
    """The results of a version of transformers (`tests/golden/make_layouts.py`)."""
    return json.loads((layouts.GOLDEN / f"layouts_{version}.json").read_text())


def read(directory: pathlib.Path, texts: list[str]) -> dict[str, Any]:
    """The results of this library, in the form of `recorded`."""
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    plain = tokenizer.encode("Hello world", add_special_tokens=False)
    whole = tokenizer.encode("Hello world")
    assert whole[len(whole) - len(plain) :] == plain  # nothing is added at the end
    names = ("bos_token", "eos_token", "pad_token")
    named = {name: getattr(tokenizer, f"{name}_id") for name in names}
    return {
        "named": {name: index for name, index in named.items() if index is not None},
        "begins": whole[: len(whole) - len(plain)],
        "ids": ids,
        "decoded": tokenizer.decode(ids[-1]),
        "chat": None
        if tokenizer.chat_template is None
        else tokenizer.apply_chat_template(layouts.MESSAGES),
    }


@pytest.mark.parametrize("name", layouts.TABLE)
def test_well_known_layouts(name, tmp_path):
    layout = layouts.TABLE[name]
    layouts.write(tmp_path / "model", layout)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = read(tmp_path / "model", layouts.texts(layout))
    expected = [recorded(version)["table"][name] for version in (4, 5)]
    for key, value in found.items():
        assert value in [each.get(key) for each in expected], key
