"""Checkpoints: load and save models, adapters and tokenizers."""

from dms_jax.checkpoint.loading import load
from dms_jax.checkpoint.saving import save
from dms_jax.checkpoint.tokenizer import Tokenizer

__all__ = ["Tokenizer", "load", "save"]
