"""The documentation's tables of models match the models that load."""

import json
import pathlib

import pytest

from dms_jax.command_line.shapes import (
    LENGTHS,
    SHAPES,
    cache_sizes,
)
from dms_jax.config import ModelConfig
from dms_jax.config_checks import FAMILIES, SUPPORTED
from dms_jax.policies import DMS, Vanilla

ROOT = pathlib.Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden" / "families"


def test_every_family_has_a_golden_checkpoint_and_a_row():
    """The checkpoints are those of `tests/model/test_parity.py` and `tests/checkpoint`."""
    configs = [json.loads((folder / "config.json").read_text()) for folder in GOLDEN.iterdir()]
    assert {ModelConfig.from_hf(config).model_type for config in configs} == set(FAMILIES)
    assert {shape.model_type for shape in SHAPES.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_survive_a_config_round_trip(name):
    config = SHAPES[name]
    assert ModelConfig.from_hf(config.to_hf()) == config


def test_readme_and_pages_name_supported_models():
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"Models: {SUPPORTED}; others are refused by name" in readme
    page = (ROOT / "experiments" / "docs" / "pages" / "models.md").read_text()
    for name, config in SHAPES.items():  # in the table of models, and in that of caches
        assert page.count(f"\n| {name} | ") == 2
        plain, small = cache_sizes(config, DMS(window=256), 8, 8192)
        if config.max_position_embeddings >= 8192:
            assert f"\n| {name} | {plain} | {small} | " in page


def test_cache_size_by_hand():
    """gpt-oss-20b: 12 layers that grow and 12 of 128 tokens, 8 heads of 64, two bytes a number."""
    entry, rows = 2 * 64 * 2, 12 * 8
    rings = rows * 128 * 4  # the slot of each token of a window
    windows = rows * 128 * entry + rings
    plain = rows * 8192 * entry + windows
    config = SHAPES["gpt-oss-20b"]
    assert cache_sizes(config, Vanilla(), 1, 8192)[0] == f"{plain / 1e6:,.1f}"
    kept = 257 + (8192 - 257) / 8  # its window, and an eighth of the others
    small = rows * -(-kept // 64) * 64 * entry + rows * 257 * 4 + windows
    assert cache_sizes(config, DMS(window=256), 8, 8192)[1] == f"{small / 1e6:,.1f}"
    assert cache_sizes(SHAPES["phi-3-mini-4k"], DMS(window=256), 8, 4096)[1] == ""
    assert LENGTHS == (8192, 32768, 131072)
