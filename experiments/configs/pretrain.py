"""What `experiments/pretrain.py` can be told."""

import dataclasses
import pathlib

from dms_jax import ModelConfig, recipes
from dms_jax.training import Recipe


@dataclasses.dataclass(frozen=True)
class Config:
    """Train a small model from scratch on tasks and prose that are made while it trains."""

    out: pathlib.Path = pathlib.Path("runs/reasoner")
    """Directory of the run: checkpoints, log, curves, models, summary. One there is resumed."""
    minutes: float = 9.0
    """Length of the whole call, compilation included: a timing beforehand chooses the steps."""
    steps: int | None = None
    """Optimizer steps, in place of minutes: what a summary says, to repeat its run."""
    stop_after_minutes: float | None = None
    """When to stop and write a checkpoint; the same command goes on from it, bit for bit."""
    start_from: pathlib.Path | None = None
    """Hugging Face directory to go on from with a fresh optimizer; give another seed with it."""

    slips: float = 0.0
    """Probability that a step of a worked solution is wrong in one digit (tasks' `slips`)."""
    tokenizer: pathlib.Path | None = None
    """Directory with tokenizer.json; None for the one that ships with the library."""
    hidden_size: int = 320
    """E, the width of the residual stream."""
    intermediate_size: int = 896
    """F, the width of the feed-forward networks."""
    num_layers: int = 8
    """L, the number of layers."""
    num_heads: int = 8
    """H, the query heads of a layer."""
    num_kv_heads: int = 2
    """K, the key-value heads of a layer."""
    head_dim: int = 64
    """D, the dimensions of a head."""

    sequence_length: int = 2048
    """Tokens a training sequence; the model's positions."""
    batch_size: int = 64
    """Sequences of an optimizer step."""
    learning_rate: float = 3e-3
    """Learning rate at its peak, after the warm-up."""
    warmup_steps: int = 300
    """Steps over which the rate rises."""
    decay_share: float = 1.0
    """Share of the steps over which the rate falls to nothing; the rest are at the peak."""

    evaluate_every: int = 500
    """Steps between measurements of the held-out loss."""
    held_out_sequences: int = 16
    """Sequences of each part that it is measured on."""
    checkpoint_every: int = 5000
    """Steps between checkpoints to resume from. Stopping writes one too."""
    workers: int | None = None
    """Processes that make batches; None for all cores but two, 0 for none."""
    seed: int = 0
    """Seed of the parameters and of the data."""

    def make_model_config(self, vocab_size: int) -> ModelConfig:
        """The model's shape."""
        return ModelConfig(
            vocab_size=vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.sequence_length,
            tie_embeddings=True,
        )

    def make_recipe(self, steps: int) -> Recipe:
        """The recipe for this many steps."""
        return recipes.pretraining(
            steps,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            decay_share=self.decay_share,
            sequence_length=self.sequence_length,
            batch_size=self.batch_size,
        )
