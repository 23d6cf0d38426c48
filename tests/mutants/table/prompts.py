"""Mistakes in prefill: which tokens share a program, and in which form."""

from tests.mutants.mutant import Mutant

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
]
