"""Checkpoints in llama.cpp's GGUF format.

    file.py        the header of a file: metadata and where each tensor lies
    config.py      metadata to `ModelConfig`
    weights.py     tensors under their Hugging Face names, dequantised row by row
    tokenizer.py   vocabulary, chat template and special tokens
    backends.py    a vocabulary as a tokenizer of the tokenizers library

Supported: the architectures llama (also used for Mistral's models), qwen2, qwen3, qwen3moe, gemma3
and gpt-oss. Everything else is refused by name.
"""

from dms_jax.checkpoint.gguf.config import read_model
from dms_jax.checkpoint.gguf.file import GgufFiles, is_gguf
from dms_jax.checkpoint.gguf.tokenizer import read_tokenizer

__all__ = ["GgufFiles", "is_gguf", "read_model", "read_tokenizer"]
