"""Mistakes in prefill: which tokens share a program, and in which form."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/generation/"
PROMPTS = "tests/generation/test_prompt_programs.py"
UNPADDED = "tests/model/test_unpadded.py"

MUTANTS = [
    Mutant(
        "generation: what stands where no token is is read in its place",
        "dms_jax/model/unpadded.py",
        "valid.reshape(*valid.shape, *[1] * (x.ndim - 1)), taken,",
        "True, taken,",
        (f"{UNPADDED}::test_tokens_are_packed_and_unpacked",),
    ),
    Mutant(
        "generation: the last token of a sequence is looked for by its width",
        "dms_jax/model/unpadded.py",
        "last=jnp.clip(ends - 1, 0, places - 1)",
        "last=jnp.clip(starts + width - 1, 0, places - 1)",
        (f"{UNPADDED}::test_packing_keeps_positions_and_logits",),
    ),
    Mutant(
        "generation: prompts have no padding on meshes that split heads alone",
        FOLDER + "runner.py",
        "unpadded=few and not self._on_mesh,",
        "unpadded=few,",
        (f"{PROMPTS}::test_prefill_on_mesh_is_padded",),
    ),
    Mutant(
        "generation: tokens attend in one pass until one behind the budget",
        "dms_jax/policies/budget.py",
        "        return self.budget_for(tokens)",
        "        return self.budget_for(tokens) + 1",
        ("tests/laws/test_layers.py::test_prompt_within_budget_attends_in_one_pass",),
    ),
]
