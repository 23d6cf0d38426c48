"""Rotary frequencies of released models, as transformers computes them.

Run in an environment with PyTorch (CPU) and transformers 5:

    python tests/golden/make_rope.py

Writes rope.json: for each config its inverse frequencies (float32) and attention factor.
"""

import json
import pathlib

import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "original_max_position_embeddings": 32768, "factor": 4.0}
SMALL = {"num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8}

# name: (family, head_dim, max_position_embeddings, rope_theta, rope_scaling)
CONFIGS = {
    "Llama-3.1-8B": ("llama", 128, 131072, 500000.0, LLAMA3 | {"factor": 8.0}),
    "Llama-3.2-1B": ("llama", 64, 131072, 500000.0, LLAMA3 | {"factor": 32.0}),
    "Qwen2.5-7B with YaRN": ("qwen2", 128, 32768, 1000000.0, YARN),
    "Qwen3-8B with YaRN": ("qwen3", 128, 131072, 1000000.0, YARN),
    "linear": ("llama", 128, 16384, 10000.0, {"rope_type": "linear", "factor": 4.0}),
    "YaRN, both scales": (
        "llama",
        64,
        163840,
        10000.0,
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "mscale": 0.707,
            "mscale_all_dim": 1.2,
            "beta_fast": 24,
            "beta_slow": 2,
            "truncate": False,
        },
    ),
    "YaRN, given attention factor": (
        "llama",
        64,
        32768,
        10000.0,
        YARN | {"attention_factor": 1.25, "original_max_position_embeddings": 8192},
    ),
}


def main() -> None:
    golden = {}
    for name, (family, head_dim, positions, theta, scaling) in CONFIGS.items():
        config = {
            "model_type": family,
            "vocab_size": 64,
            "hidden_size": 32 * head_dim,
            "intermediate_size": 64,
            "head_dim": head_dim,
            "max_position_embeddings": positions,
            "rope_theta": theta,
            "rope_scaling": scaling,
        } | SMALL
        given = json.loads(json.dumps(config))  # transformers fills defaults in place
        model = transformers.AutoConfig.for_model(given.pop("model_type"), **given)
        frequencies, factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](model, "cpu")
        golden[name] = {
            "config": config,
            "inverse_frequencies": [float(f"{value:.9g}") for value in frequencies.tolist()],
            "attention_factor": factor,
        }
    path = pathlib.Path(__file__).parent / "rope.json"
    path.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main()
