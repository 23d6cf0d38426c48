"""The mutants, by area."""

from tests.mutants.table import (
    adapters,
    cache,
    checkpoint,
    evaluation,
    generation,
    kernels,
    launches,
    layers,
    policies,
    prefixes,
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
    *prefixes.MUTANTS,
    *adapters.MUTANTS,
    *prompts.MUTANTS,
    *launches.MUTANTS,
    *evaluation.MUTANTS,
    *serving.MUTANTS,
    *kernels.MUTANTS,
]
