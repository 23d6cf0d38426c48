"""Positions that scaled ropes add, and fields that say nothing."""

import dataclasses

import pytest

from dms_jax.config import ModelConfig, Rope

LLAMA = {
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}


@pytest.mark.parametrize(
    ("fields", "positions"),
    [
        # Qwen2.5's card; Qwen3's, whose positions are more than the original ones; Vicuna's.
        (
            {
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                }
            },
            2048,
        ),
        (
            {
                "max_position_embeddings": 640,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                },
            },
            2048,
        ),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 1280),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}}, 1024),
        # Positions that are raised already stay.
        (
            {
                "max_position_embeddings": 2048,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                },
            },
            2048,
        ),
        (
            {
                "max_position_embeddings": 4096,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 512,
                },
            },
            4096,
        ),
        # Llama 3.1 counts them.
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 64,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                }
            },
            512,
        ),
        ({"rope_scaling": {"type": "linear", "factor": 1.0}}, 512),
        ({"rope_scaling": None}, 512),
    ],
)
def test_scaled_ropes_add_positions(fields, positions):
    config = ModelConfig.from_hf(LLAMA | fields)
    assert config.max_position_embeddings == positions
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("kind", ["linear", "yarn"])
@pytest.mark.parametrize("positions", [1, 100, 512])
def test_saved_again_and_again_it_has_the_same_positions(kind, positions):
    original = 512 if kind == "yarn" else None
    rope = Rope(kind=kind, factor=3.0, original_max_position_embeddings=original)
    config = dataclasses.replace(
        ModelConfig.from_hf(LLAMA), max_position_embeddings=positions, rope=rope
    )
    once = ModelConfig.from_hf(config.to_hf())
    assert ModelConfig.from_hf(once.to_hf()) == once
    assert once.rope == rope


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization_config": {}},
        {"quantization_config": None},
        {"rope_scaling": {}},
        {"model_type": "qwen2", "use_sliding_window": None, "num_key_value_heads": 4},
        {
            "model_type": "qwen3",
            "use_sliding_window": None,
            "sliding_window": 4,
            "num_key_value_heads": 4,
        },
        {"rope_scaling": {"rope_type": "default", "mrope_section": []}},
        {"layer_types": None, "pretraining_tp": None, "num_experts": None, "hidden_act": None},
    ],
)
def test_fields_that_say_nothing_are_no_reason_to_refuse(fields):
    assert ModelConfig.from_hf(LLAMA | fields).max_position_embeddings == 512


def test_a_window_counts_if_the_positions_that_yarn_adds_exceed_it():
    """A model of 512 positions never leaves its window of 512; one of 2048 does."""
    fields = {"model_type": "mistral", "sliding_window": 512, "num_key_value_heads": 4}
    never = ModelConfig.from_hf(LLAMA | fields)
    assert (never.max_position_embeddings, never.window) == (512, None)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert ModelConfig.from_hf(LLAMA | fields | {"rope_scaling": yarn}).window == 512
