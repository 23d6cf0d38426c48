"""The mutants, by area."""

from tests.mutants.table import (
    cache,
    checkpoint,
    evaluation,
    generation,
    kernels,
    policies,
    serving,
    training,
)

MUTANTS = [
    *policies.MUTANTS,
    *training.MUTANTS,
    *cache.MUTANTS,
    *checkpoint.MUTANTS,
    *generation.MUTANTS,
    *evaluation.MUTANTS,
    *serving.MUTANTS,
    *kernels.MUTANTS,
]
