"""Incremental detokenization: pieces add up for all chunkings, and stop strings end the text."""

import functools
import pathlib

import numpy as np
import pytest

from dms_jax.cache.accounting import Meter
from dms_jax.checkpoint import Tokenizer
from dms_jax.generation.requests import Request
from dms_jax.generation.sampling import Sampling
from dms_jax.generation.text import TextTracker

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tokenizers"
KINDS = ["qwen2", "gpt2", "mistral", "stories260k"]
END = 2


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    return Tokenizer.from_directory(GOLDEN / kind)


def request(max_new_tokens: int, stop=(), prompt=(1,)) -> Request:
    return Request(
        index=0,
        prompt=list(prompt),
        seed=0,
        copy=0,
        max_new_tokens=max_new_tokens,
        max_length=1 + max_new_tokens,
        meter=Meter(rows=1),
        sampling=Sampling(stop=stop),
    )


def stream(kind: str, tokens, sizes, *, stop=(), limit=None, end_tokens=(), prompt=(1,)):
    """Feeds tokens in chunks of the given sizes (the last size repeats); returns the pieces."""
    tracker = TextTracker(tokenizer(kind), tuple(end_tokens))
    running = request(len(tokens) if limit is None else limit, tuple(stop), prompt)
    pieces, done = [], 0
    sizes = list(sizes)
    while running.finish_reason is None:
        size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
        new = list(tokens[done : done + size])
        fed = len(new) - (done == 0)
        running.generated += new
        running.logprobs += [0.0] * len(new)
        running.likeliest += [(0, 0.0)] * len(new)
        running.steps.append(np.ones((2, fed), np.int32))
        done += size
        pieces.append(tracker.update(running))
    return running, pieces


def random_tokens(kind: str, count: int, seed: int) -> list[int]:
    """Returns random ids with runs of real text among them."""
    random = np.random.default_rng(seed)
    known = tokenizer(kind).encode("Ünïcödé: 你好, мир 🙂🙂 naïve\n\n  two  spaces", False)
    tokens: list[int] = []
    while len(tokens) < count:
        tokens += random.integers(0, tokenizer(kind).vocab_size, random.integers(1, 6)).tolist()
        start = random.integers(len(known))
        tokens += known[start : start + random.integers(1, 12)]
    return tokens[:count]


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_add_up_to_the_decoded_whole(kind):
    for seed in range(4):
        tokens = random_tokens(kind, 150, seed)
        whole = tokenizer(kind).decode(tokens)
        random = np.random.default_rng(seed)
        for sizes in ([1], [7], [150], random.integers(1, 20, 200)):
            running, pieces = stream(kind, tokens, sizes)
            assert running.text == whole
            assert "".join(pieces) == whole
            assert running.finish_reason == "length"


@pytest.mark.parametrize("kind", KINDS)
def test_answer_text_continues_prompt(kind):
    """Prompt and answer add up to the text for every cut; no space between words is lost."""
    text = "if a:\n    return two words + 3\n"
    tokens = tokenizer(kind).encode(text, False)
    whole = tokenizer(kind).decode(tokens)
    for cut in range(1, len(tokens)):
        prompt, answer = tokens[:cut], tokens[cut:]
        want = whole.removeprefix(tokenizer(kind).decode(prompt))
        for sizes in ([1], [3], [len(answer)]):
            running, pieces = stream(kind, answer, sizes, prompt=prompt)
            assert running.text == "".join(pieces) == want
        later = request(len(answer), prompt=prompt)
        later.generated = answer
        TextTracker(tokenizer(kind), ()).decode(later)
        assert later.text == want


def test_text_starts_after_special_token():
    tokens = tokenizer("mistral").encode("Sure thing", False)
    begin = tokenizer("mistral").bos_token_id
    running, _ = stream("mistral", tokens, [1], prompt=[*tokens, begin])
    assert running.text == "Sure thing"


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "stories260k"])
def test_incomplete_character_is_held_back(kind):
    text = "a 🙂"
    tokens = tokenizer(kind).encode(text, False)
    parts = [tokenizer(kind).decode(tokens[:n]) for n in range(1, len(tokens))]
    assert any("\ufffd" in part for part in parts)  # otherwise the test cuts nothing
    running, pieces = stream(kind, tokens, [1])
    assert running.text == text
    assert not any("\ufffd" in piece for piece in pieces)


def known(kind: str, tokens: list[int]) -> str:
    """The text of tokens without possibly incomplete last characters."""
    return tokenizer(kind).decode(tokens).rstrip("\ufffd")


@pytest.mark.parametrize("kind", KINDS)
def test_stop_string_does_not_depend_on_chunks(kind):
    for seed in range(3):
        tokens = random_tokens(kind, 120, seed + 10)
        whole = tokenizer(kind).decode(tokens)
        # Two strings from the middle, which start and end anywhere within tokens; one that never
        # occurs; one of which only the start occurs.
        stops = [whole[60:64], whole[80:83], "never there", whole[20:22] + "\x00"]
        stops = [stop for stop in stops if stop]  # the text may be shorter
        fewest = next(
            n
            for n in range(1, len(tokens) + 1)
            if any(stop in known(kind, tokens[:n]) for stop in stops)
        )
        decoded = known(kind, tokens[:fewest])
        cut = min(decoded.find(stop) for stop in stops if stop in decoded)
        for sizes in ([1], [2], [9], [200]):
            running, pieces = stream(kind, tokens, sizes, stop=stops)
            assert running.finish_reason == "stop"
            assert running.generated == tokens[:fewest]
            assert len(running.logprobs) == len(running.likeliest) == fewest
            assert [len(each) for each in running.totals()] == [fewest - 1] * 2
            assert running.text == "".join(pieces) == decoded[:cut]


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "stories260k"])
@pytest.mark.parametrize("stop", ["\ufffd", " \ufffd", "\ufffd\ufffd"])
def test_incomplete_character_is_no_stop_string(kind, stop):
    """It decodes to U+FFFD until the other bytes come, a run of single bytes to several."""
    text = "a 🙂🙂 你 b"
    tokens = tokenizer(kind).encode(text, False)
    assert any("\ufffd" in tokenizer(kind).decode(tokens[:n]) for n in range(len(tokens)))
    for sizes in ([1], [2], [3, 1], [200]):
        running, pieces = stream(kind, tokens, sizes, stop=[stop])
        assert (running.finish_reason, running.generated) == ("length", tokens)
        assert running.text == "".join(pieces) == text


@pytest.mark.parametrize("kind", ["qwen2", "mistral", "stories260k"])
@pytest.mark.parametrize("ends", ["text", "end", "length"])
def test_broken_character_is_stop_string(kind, ends):
    smile = tokenizer(kind).encode("a 🙂", False)
    broken = smile[: next(n for n in range(9) if "\ufffd" in tokenizer(kind).decode(smile[:n]))]
    behind = tokenizer(kind).encode("and so on", False) if ends == "text" else []
    tokens = [*broken, *behind, *([END] if ends == "end" else [])]
    kept = [*broken, *behind[:1]]  # only the following tokens decide
    for sizes in ([1], [2], [len(broken) - 1, 1], [len(broken), 1], [200]):
        running, pieces = stream(kind, tokens, sizes, stop=["\ufffd"], end_tokens=[END])
        assert (running.finish_reason, running.generated) == ("stop", kept)
        assert running.text == "".join(pieces) == "a "


@pytest.mark.parametrize("kind", ["mistral", "stories260k"])
def test_long_run_of_bytes_does_not_depend_on_chunks(kind):
    """It is committed in parts of whole characters."""
    parts = [tokenizer(kind).backend.token_to_id(f"<0x{byte:02X}>") for byte in "你".encode()]
    tokens = parts * 41
    for sizes in ([1], [2], [7], [64], [200]):
        running, _ = stream(kind, tokens, sizes, stop=["\ufffd"])
        assert (running.finish_reason, running.text) == ("length", "你" * 41)


def test_possible_stop_string_is_held_back():
    tokens = tokenizer("stories260k").encode("one two three four", False)
    running, pieces = stream("stories260k", tokens, [1], stop=["two thread", "three five"])
    assert running.text == "".join(pieces) == "one two three four"
    so_far = ["".join(pieces[: n + 1]) for n in range(len(pieces))]
    for shown, n in zip(so_far, range(1, len(tokens)), strict=False):
        known = tokenizer("stories260k").decode(tokens[:n])
        assert known.startswith(shown)
        if known.endswith("two"):
            assert shown == "one "
        if known.endswith("two three"):
            assert shown == "one two "


def test_end_token_is_not_text():
    letters = tokenizer("stories260k").encode("cat sat", False)
    for end in (END, letters[-1]):
        tokens = [*letters[:-1], end]
        running, pieces = stream("stories260k", tokens, [3], limit=99, end_tokens=(END, end))
        assert running.finish_reason == "end"
        assert running.generated == tokens
        assert running.text == "".join(pieces) == tokenizer("stories260k").decode(tokens[:-1])


def test_stop_string_before_end_token_wins():
    tokens = [*tokenizer("stories260k").encode("cat sat.", False), END]
    running, _ = stream("stories260k", tokens, [50], stop=[" s"], end_tokens=(END,))
    assert (running.finish_reason, running.text) == ("stop", "cat")
    assert END not in running.generated


def test_no_text_without_tokenizer():
    tracker = TextTracker(None, (END,))
    running = request(5, ("stop",))
    running.generated = [7, END]
    assert tracker.update(running) == ""
    assert (running.finish_reason, running.text) == ("end", "")
