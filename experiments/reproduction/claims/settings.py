"""Settings of the reproduction."""

import dataclasses
import pathlib
from typing import Literal

import dms_jax


@dataclasses.dataclass(frozen=True)
class Config:
    """Try the claims of the papers on a small reasoning model."""

    out: pathlib.Path = pathlib.Path("runs/claims")
    """Run directory. What is there already is not done again."""
    model: str = ""
    """Hugging Face directory of the base model; the shipped reasoning model unless given."""
    pages: pathlib.Path | None = None
    """Folder for REPORT.md and its pictures; the run directory unless given."""
    pack: pathlib.Path | None = None
    """Folder for an archive of all results; nowhere unless given."""
    processes: int = 1
    """Workers, which take turns on the GPUs."""
    deadline_minutes: float = 1e6
    """Nothing starts later than this after the beginning, and trainings stop at a checkpoint."""
    only: Literal["all", "report"] = "all"
    """"report" does no job and writes the page from what is there."""
    trainings: tuple[str, ...] = ()
    """Only these trainings; all unless given."""

    shards: int = 16
    """Jobs that the generation of the data is split into."""
    documents: int = 120_000
    """Self-written documents of all shards together."""
    document_tokens: int = 1000
    """Longest completion of the training data."""
    document_temperature: float = 1.0
    """Sampling temperature of the training data."""
    sequence_length: int = 2048
    """Tokens of a training sequence."""
    batch_tokens: int = 65_536
    """Tokens of an optimizer step."""
    decay_steps: int = 300
    """Steps in which the borrowed neuron of DMS is faded out."""
    steps_per_ratio: int = 300
    """Steps a unit of compression ratio, of DMS and of DMC."""
    settle_steps: int = 300
    """Steps at the reached ratio that end a training of DMC, its rate falling to a tenth."""
    seeds: int = 3
    """Seeds of the trainings, and of the draws of vanilla."""

    problems: int = 480
    """Reasoning problems of a measure with four chains, a third of each kind."""
    frontier_problems: int = 240
    """Reasoning problems of the frontier."""
    frontier_chains: int = 16
    """W, chains of each problem of the frontier."""
    retrieval_problems: int = 240
    """Needle problems, and tracking problems."""
    temperature: float = 0.7
    """Sampling temperature of every answer; 0 takes the most likely token."""
    lanes: int = 4096
    """Sequences in the cache at a time."""
    page_size: int = 64
    """Tokens a page of the cache; Quest has 16, as published."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and not value > 0:
                raise dms_jax.ConfigError(f"{field.name} must be positive, got {value}")
