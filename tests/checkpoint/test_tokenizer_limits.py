"""A tokenizer.json that asks for the impossible is refused before it is built."""

import dataclasses
import json
import time

import pytest

from dms_jax.checkpoint import Tokenizer, sentencepiece
from dms_jax.checkpoint.sentencepiece import PieceType
from dms_jax.checkpoint.tokenizer_limits import check_layout
from dms_jax.errors import CheckpointError
from tests.checkpoint.tokenizer_layouts import GOLDEN, fast, write


def replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*steps: dict) -> dict:
    return {"type": "Sequence", "normalizers": list(steps)}


def nested(depth: int) -> dict:
    node = {"type": "NFC"}
    for _ in range(depth):
        node = sequence(node)
    return node


LETTER = {"String": "l"}
SIXTEEN = replace(LETTER, "l" * 16)
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}
BOMBS = {
    "a word of 6 * 10^10 letters": {"normalizer": sequence(*[SIXTEEN] * 9)},
    "three steps of sixteen": {"normalizer": sequence(SIXTEEN, SIXTEEN, SIXTEEN)},
    "in sequences of their own": {"normalizer": sequence(*[sequence(SIXTEEN)] * 5)},
    "doubled forty times": {"normalizer": sequence(*[replace(LETTER, "ll")] * 40)},
    "at every place": {"normalizer": sequence(*[replace({"Regex": "x*"}, "l" * 60)] * 2)},
    "before every letter": {"normalizer": sequence(*[replace({"Regex": "(?=l)"}, "l")] * 40)},
    "an empty text replaced": {"normalizer": sequence(*[replace({"String": ""}, "ab")] * 9)},
    "one long replacement": {"normalizer": replace(LETTER, "l" * 10_000)},
    "characters of eighteen": {
        "normalizer": sequence(*[{"type": "NFKC"}, replace({"String": " "}, "\ufdfa")] * 8)
    },
    "a long beginning": {"normalizer": {"type": "Prepend", "prepend": "l" * 10**6}},
    "in the decoder": {"decoder": {"type": "Sequence", "decoders": [SIXTEEN] * 9}},
    "too many steps": {"normalizer": sequence(*[{"type": "NFC"}] * 1000)},
    "too deep": {"normalizer": nested(40)},
    "a million begin tokens": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 1000,
            "pair": [],
            "special_tokens": {"a": {"id": "a", "ids": [0], "tokens": ["a"]}},
        }
    },
    "one begin token of many ids": {
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "a", "type_id": 0}}],
            "pair": [],
            "special_tokens": {"a": {"id": "a", "ids": [0] * 1000, "tokens": ["a"] * 1000}},
        }
    },
    "too many added tokens": {"added_tokens": [{}] * 100_001},
    "a regular expression of a megabyte": {
        "pre_tokenizer": SPLIT | {"pattern": {"Regex": "a|" * 500_000}}
    },
}


@pytest.mark.parametrize("name", BOMBS)
def test_bombs_are_refused(name):
    layout = json.dumps(fast("gpt2") | BOMBS[name]).encode()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is refused"):
        check_layout(layout)


def test_directory_with_a_bomb_is_refused(tmp_path):
    layout = fast("gpt2", **BOMBS["a word of 6 * 10^10 letters"])
    write(tmp_path / "model", [], {"tokenizer.json": layout})
    with pytest.raises(CheckpointError, match="makes up to 68,719,476,736 characters of one"):
        Tokenizer.from_directory(tmp_path / "model")


PUBLISHED = [
    {"normalizer": None},
    {
        "normalizer": sequence(
            {"type": "Prepend", "prepend": "\u2581"}, replace({"String": " "}, "\u2581")
        )
    },
    {"normalizer": sequence({"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Precompiled"})},
    {"normalizer": sequence(replace({"Regex": " {2,}"}, " "), replace({"Regex": r"\s+"}, " "))},
    {"normalizer": sequence(replace({"String": "``"}, '"'), {"type": "NFKD"})},
    {"normalizer": {"type": "BertNormalizer"}},
]


@pytest.mark.parametrize("parts", PUBLISHED)
def test_published_layouts_are_accepted(parts):
    check_layout(json.dumps(fast("gpt2") | parts).encode())


def stories_with(*pieces: str, kind: PieceType) -> sentencepiece.SentencePieceModel:
    model = sentencepiece.parse((GOLDEN / "stories260k" / "tokenizer.model").read_bytes())
    return dataclasses.replace(
        model,
        pieces=model.pieces + pieces,
        scores=model.scores + (0.0,) * len(pieces),
        types=model.types + (kind,) * len(pieces),
    )


def test_many_control_pieces_are_added_at_once():
    """One by one they would take minutes."""
    wide = stories_with(*(f"<|{index}|>" for index in range(10_000)), kind=PieceType.CONTROL)
    start = time.thread_time()
    backend = sentencepiece.build(wide)
    assert backend.encode("Lily<|9999|>", add_special_tokens=False).ids[-1] == len(wide.pieces) - 1
    assert time.thread_time() - start < 5


def test_piece_longer_than_any_trainer_makes_is_refused():
    with pytest.raises(CheckpointError, match="longer than any trainer makes"):
        sentencepiece.build(stories_with("a" * 10**5, kind=PieceType.NORMAL))
