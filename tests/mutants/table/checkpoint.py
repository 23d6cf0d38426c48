"""Mistakes in `dms_jax/checkpoint`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/checkpoint/"
GGUF = "tests/checkpoint/test_gguf.py"
ADAPTER = "tests/checkpoint/test_adapter.py"

MUTANTS = [
    Mutant(
        "gguf: the rows of heads are permuted once more instead of back",
        FOLDER + "gguf/weights.py",
        ".reshape(heads, size // heads // 2, 2)",
        ".reshape(heads, 2, size // heads // 2)",
        (f"{GGUF}::test_logits_equal_those_of_transformers",),
    ),
    Mutant(
        "tokenizers: runs of spaces are looked for in text that is not escaped",
        FOLDER + "gguf/backends.py",
        "escaped=not prefix",
        "escaped=False",
        (
            "tests/checkpoint/test_gguf_tokenizers.py::test_sentencepiece_ids_are_those_of_the_reference",
        ),
    ),
    Mutant(
        "adapter: only the shape of a base is compared",
        FOLDER + "adapter.py",
        'other = [k for k in kinds if found["sha256"].get(k) != adapter.hashes.get(k)]',
        "other = []",
        (f"{ADAPTER}::test_base_with_other_numbers_is_refused",),
    ),
    Mutant(
        "adapter: a base that was trained is not noticed",
        "dms_jax/training/trainer.py",
        'source=None if recipe.trained_for(policy) == "all" else model.source',
        "source=model.source",
        (f"{ADAPTER}::test_retrofit_of_frozen_weights_and_of_all",),
    ),
    Mutant(
        "tokens: added_tokens.json is not read",
        FOLDER + "added_tokens.py",
        '    if given is None:\n        name = "added_tokens.json"',
        '    if False:\n        name = "added_tokens.json"',
        ("tests/checkpoint/test_layouts.py::test_well_known_layouts",),
    ),
    Mutant(
        "tokens: a context ends in the token that ends a text",
        FOLDER + "tokenizer.py",
        "found.ids[: len(found) - self._ending(found)]",
        "found.ids",
        (
            "tests/checkpoint/test_added_tokens.py::test_encode_adds_only_begin_tokens_of_post_processor",
        ),
    ),
    Mutant(
        "gguf: turns that are typed as text are cut to pieces",
        FOLDER + "gguf/tokenizer.py",
        "if kind not in (PieceType.NORMAL, PieceType.UNUSED) or token in made:",
        "if True:",
        ("tests/checkpoint/test_gguf_token_types.py",),
    ),
]
