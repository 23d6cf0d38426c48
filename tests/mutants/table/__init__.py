"""The mutants, by area."""

from tests.mutants.table import (
    cache,
    checkpoint,
    evaluation,
    generation,
    kernels,
    launches,
    layers,
    policies,
    prompts,
    serving,
    training,
)

MUTANTS = [
    *policies.MUTANTS,
    *training.MUTANTS,
    *layers.MUTANTS,
    *cache.MUTANTS,
    *checkpoint.MUTANTS,
    *generation.MUTANTS,
    *prompts.MUTANTS,
    *launches.MUTANTS,
    *evaluation.MUTANTS,
    *serving.MUTANTS,
    *kernels.MUTANTS,
]
