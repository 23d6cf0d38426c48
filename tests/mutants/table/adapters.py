"""Mistakes with several adapters in one batch, and when weights are replaced."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/generation/"
LAW = "tests/laws/test_adapters.py"
ALONE = f"{LAW}::test_batched_adapters_answer_as_each_alone"
ADAPTERS = "tests/generation/test_adapters.py"
SERVING = "tests/serving/test_adapters.py"

MUTANTS = [
    Mutant(
        "adapters: equal prompts of two are copies of each other",
        FOLDER + "requests.py",
        "equal = seed, number_of[id(tokens)], adapter",
        "equal = seed, number_of[id(tokens)]",
        (f"{ADAPTERS}::test_adapters_share_no_copies",),
    ),
    Mutant(
        "adapters: a lane keeps that of its last request",
        FOLDER + "runner.py",
        "            self._adapter_of[lane] = name\n",
        "            self._adapter_of[lane] = name or self._adapter_of[lane]\n",
        (f"{SERVING}::test_requests_select_adapter_by_model",),
    ),
    Mutant(
        "adapters: a program of some lanes takes those of the first ones",
        FOLDER + "programs.py",
        "adapters=jax.tree.map(lambda x: take(x[None])[0], cache.adapters)",
        "adapters=jax.tree.map(lambda x: x[: len(page_table[0])], cache.adapters)",
        (ALONE,),
    ),
]
