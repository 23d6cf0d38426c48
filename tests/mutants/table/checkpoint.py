"""Mistakes in `dms_jax/checkpoint`."""

from tests.mutants.mutant import Mutant

FOLDER = "dms_jax/checkpoint/"
GGUF = "tests/checkpoint/test_gguf.py"
REFUSALS = "tests/checkpoint/test_gguf_refusals.py"
TOKENIZERS = "tests/checkpoint/test_gguf_tokenizers.py"
WRAPPED = "tests/checkpoint/test_wrapped_names.py"
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
        "gguf: Llama 3's rotary factors are left out",
        FOLDER + "gguf/config.py",
        "if factors is not None and (factors != 1).any():",
        "if factors is None:",
        (f"{GGUF}::test_rotary_factors_of_llama3",),
    ),
    Mutant(
        "gguf: the end of a message of harmony ends an answer",
        FOLDER + "gguf/tokenizer.py",
        "if vocabulary.ids.keys() >= _HARMONY:",
        "if False:",
        (f"{TOKENIZERS}::test_harmony_message_end_does_not_end_an_answer",),
    ),
    Mutant(
        "tokenizers: runs of spaces are looked for in text that is not escaped",
        FOLDER + "gguf/tokenizer.py",
        "escaped=not prefixed",
        "escaped=False",
        (f"{TOKENIZERS}::test_sentencepiece_ids_are_those_of_the_reference",),
    ),
    Mutant(
        "checkpoints: what reads images is kept beside the language model",
        FOLDER + "wrappers.py",
        'if name.removeprefix("model.").startswith(_IMAGES):',
        "if False:",
        (f"{WRAPPED}::test_language_model_of_a_vision_model_is_loaded",),
    ),
    Mutant(
        "checkpoints: a language model is tied as its own config says, not the whole one's",
        "dms_jax/config_checks.py",
        "found |= {name: config[name] for name in _OF_WRAPPERS if",
        "found |= {name: config[name] for name in () if",
        (f"{WRAPPED}::test_qwen3_vl_text_config_without_rope",),
    ),
    Mutant(
        "gguf: unknown metadata are accepted",
        FOLDER + "gguf/config.py",
        "        if unknown:\n            raise ConfigError(",
        "        if False:\n            raise ConfigError(",
        (f"{REFUSALS}::test_unserved_metadata_are_refused",),
    ),
    Mutant(
        "gguf: the end of a turn does not end an answer",
        FOLDER + "gguf/tokenizer.py",
        'for name in ("eot", "eom"))',
        'for name in ("eom",))',
        (f"{TOKENIZERS}::test_end_tokens",),
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
        "tokens: those of added_tokens_decoder are not added",
        FOLDER + "added_tokens.py",
        "    _add_numbered(backend, _numbered(config), special)\n",
        "",
        ("tests/checkpoint/test_layouts.py::test_well_known_layouts",),
    ),
    Mutant(
        "tokens: a context ends in the token that ends a text",
        FOLDER + "tokenizer.py",
        "found.ids[: len(found) - self._ending(found)]",
        "found.ids",
        ("tests/checkpoint/test_added_tokens.py::test_post_processors_that_add_tokens",),
    ),
    Mutant(
        "tokens: the tokenizer's end token ends no answer where a config names another",
        FOLDER + "contents.py",
        "eos_token_ids=tuple(dict.fromkeys(index for given in ends for index in given))",
        "eos_token_ids=next(iter(ends), ())",
        ("tests/checkpoint/test_added_tokens.py::test_end_tokens_of_all_files_end_an_answer",),
    ),
    Mutant(
        "gguf: turns that are typed as text are cut to pieces",
        FOLDER + "gguf/tokenizer.py",
        "if kind not in (PieceType.NORMAL, PieceType.UNUSED) or token in made:",
        "if True:",
        ("tests/checkpoint/test_gguf_token_types.py",),
    ),
    Mutant(
        "config: the positions that yarn adds are not usable",
        "dms_jax/config.py",
        "    return max(positions, extended)",
        "    return positions",
        ("tests/test_config.py::test_scaled_ropes_add_positions",),
    ),
]
