"""The mutants, by area."""

from tests.mutants.table import cache, evaluation, generation, kernels, policies, training

MUTANTS = [
    *policies.MUTANTS,
    *training.MUTANTS,
    *cache.MUTANTS,
    *generation.MUTANTS,
    *evaluation.MUTANTS,
    *kernels.MUTANTS,
]
