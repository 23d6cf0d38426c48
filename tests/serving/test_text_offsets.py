"""`logprobs.text_offset`: the offset of each token in the text, also within a character.

The oracle works on bytes: the offset is that of the character with the token's first byte.
"""

import pathlib

import pytest

from dms_jax import assets
from dms_jax.checkpoint import Tokenizer
from dms_jax.generation import Sampling
from dms_jax.generation.text import TextOffsets
from dms_jax.serving.completions_api import CompletionFormatter
from dms_jax.serving.requests import Asked, GenerationRequest
from tests.serving.scripted import served_model

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tokenizers"
KINDS = ["stories260k", "gpt2", "qwen2", "mistral"]
TEXTS = [
    " I \U0001f600 it",
    " 日本語 is 日本\nand 日",
    "\n\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7e\u0301 Zoë's ½ naïve \x00 café",
    "\U0001f600" * 70 + " end",
    "    def f(x):\n\treturn 'ключ'\n",
]


def tokenizer(kind):
    path = assets.path("stories260k") if kind == "stories260k" else GOLDEN / kind
    found = Tokenizer.from_directory(path)
    assert found is not None
    return found


def places(tokens, text, own):
    """The oracle: the character of each token's first byte."""
    starts = [0]
    for char in text:
        starts.append(starts[-1] + len(char.encode()))
    expected, byte = [], 0
    for token in tokens:
        expected.append(max(place for place, start in enumerate(starts) if start <= byte))
        byte += len(own.bytes_of(token))
    assert byte == starts[-1]
    return expected


def encoded(text, own):
    """A prompt and the tokens of a text after it; None if the tokenizer cannot encode the text."""
    prompt = own.encode("So", False)
    tokens = own.encode("So" + text, False)[len(prompt) :]
    whole = own.decode(prompt + tokens)[len(own.decode(prompt)) :]
    return None if "\ufffd" in whole else (prompt, tokens, whole)


@pytest.mark.parametrize("kind", KINDS)
def test_offset_is_that_of_first_byte(kind):
    own, seen = tokenizer(kind), 0
    for text in TEXTS:
        if (found := encoded(text, own)) is None or None in map(own.bytes_of, found[1]):
            continue
        prompt, tokens, whole = found
        seen += 1
        assert TextOffsets(own, prompt).add(tokens) == places(tokens, whole, own)
        pieces = TextOffsets(own, prompt)
        assert [pieces.add([each])[0] for each in tokens] == places(tokens, whole, own)
    assert seen > 0


def test_offsets_are_equal_whole_and_streamed():
    own = tokenizer("stories260k")
    found = encoded(TEXTS[0], own)
    assert found is not None
    prompt, tokens, text = found
    asked = Asked("stories", [prompt], {})
    ask = GenerationRequest(asked, [prompt], Sampling(logprobs=True))
    served = served_model("plain", tokenizer=own)

    def told(*pieces):
        formatter = CompletionFormatter(ask, served)
        parts = [formatter.logprobs(0, part, [0.0] * len(part)) for part in pieces]
        return [place for part in parts if part is not None for place in part["text_offset"]]

    assert told(tokens) == told(*([each] for each in tokens)) == told(tokens[:4], tokens[4:])
    assert told(tokens)[-1] == text.index(" it")
