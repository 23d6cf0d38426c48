"""Files and texts from elsewhere: broken, mis-shaped, or no text at all."""

import json
import re
import shutil

import numpy as np
import pytest
import tokenizers

from dms_jax import assets
from dms_jax.checkpoint import Tokenizer, load, save
from dms_jax.errors import CheckpointError, ConfigError, DataError, DmsJaxError
from dms_jax.policies import Vanilla
from tests.checkpoint.support import copy, rewrite, tensors


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved") / "stories"
    save(load(assets.path("stories260k")), Vanilla(), directory)
    return directory


@pytest.fixture
def stories(saved, tmp_path):
    """A whole checkpoint, to be changed."""
    return shutil.copytree(saved, tmp_path / "stories")


@pytest.fixture
def llama(tmp_path):
    return copy("families/llama31", tmp_path / "llama")


def refusal(directory):
    with pytest.raises(CheckpointError) as error:
        load(directory)
    return str(error.value)


def test_links_are_followed(stories):
    """A hub cache holds nothing but links."""
    (stories / "blobs").mkdir()
    for file in [each for each in stories.iterdir() if each.is_file()]:
        file.rename(stories / "blobs" / file.name)
        file.symlink_to(f"blobs/{file.name}")
    assert load(stories).tokenizer is not None


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_broken_links_and_folders_are_refused(stories, name):
    (stories / name).unlink()
    (stories / name).symlink_to("absent")
    assert f"{name} is not a file" in refusal(stories)
    (stories / name).unlink()
    (stories / name).mkdir()
    assert f"{name} is not a file" in refusal(stories)


def test_text_that_is_not_utf8_is_refused(stories):
    (stories / "chat_template.jinja").write_bytes(b"\xff\xfe{{ 1 }}")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja is not text in UTF-8"):
        load(stories)


def test_half_a_surrogate_pair_in_a_text_is_refused(stories):
    model = load(stories)
    with pytest.raises(DataError, match=r"half of a surrogate pair \('\\ud83d' at place 3\)"):
        model.tokenizer.encode("abc\ud83d")


@pytest.mark.parametrize("ids", [[-1], [2**32], [1, 2**70]])
def test_impossible_token_ids_are_refused(stories, ids):
    with pytest.raises(DataError, match="token ids to decode must lie in"):
        load(stories).tokenizer.decode(ids)


@pytest.mark.parametrize(
    ("field", "value", "stage"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "load"),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "encode"),
    ],
)
def test_tokenizer_panics_become_errors(stories, field, value, stage):
    file = stories / "tokenizer.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {field: value}))
    if stage == "load":
        with pytest.raises(CheckpointError, match="tokenizer"):
            Tokenizer.from_directory(stories)
        return
    with pytest.raises(DataError, match="the tokenizer failed on the text"):
        Tokenizer.from_directory(stories).encode("a" * 40 + "b")


def test_empty_tokenizer(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_directory(tmp_path).vocab_size == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [(-2, "not a token of the model"), (True, "must be a token id"), ([[1]], "must be a token id")],
)
def test_malformed_special_ids_are_refused(llama, value, message):
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        (llama / "generation_config.json").write_text(json.dumps({name: value}))
        assert re.search(f"{name} .*{message}", refusal(llama))


def test_repeated_and_absent_special_ids(llama):
    """Old configs write -1 for no token."""
    (llama / "generation_config.json").write_text('{"eos_token_id": [2, 2, 7], "pad_token_id": -1}')
    defaults = load(llama).generation
    assert (defaults.eos_token_ids, defaults.pad_token_id) == ((2, 7), None)


@pytest.mark.parametrize("shape", [(61, 12), ()])
def test_tied_head_of_another_shape_is_refused(tmp_path, shape):
    directory = copy("families/llama32_tied", tmp_path / "tied")
    content = tensors(directory)
    content["lm_head.weight"] = np.zeros(shape, np.float32)
    rewrite(directory, content)
    with pytest.raises(CheckpointError, match=r"mis-shaped: lm_head\.weight is"):
        load(directory)
    content["model.embed_tokens.weight"] = content["lm_head.weight"]
    rewrite(directory, content)
    with pytest.raises(CheckpointError, match=r"mis-shaped: model\.embed_tokens\.weight is"):
        load(directory)


def assert_can_be_shown(error: DmsJaxError) -> None:
    message = str(error)
    assert len(message) <= 20_000
    assert message.replace("\n", "").isprintable()
    message.encode("utf-8")


def test_messages_are_short_and_printable_whatever_they_quote():
    for text in ("\x1b[31m" * 10**6, "\ud800", "a\r\nb\tc\0", "\u202e", "x" * 10**7):
        assert_can_be_shown(CheckpointError(text))
    assert str(CheckpointError("a\nb")) == "a\nb"
    assert str(CheckpointError("begin" + "x" * 10**6 + "what to do")).endswith("what to do")
    assert str(ConfigError()) == ""
