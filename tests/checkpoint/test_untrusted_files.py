"""Untrusted checkpoint directories: links, pipes, devices, sizes, contents."""

import json
import os
import re
import shutil
import struct
import time

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from dms_jax import assets
from dms_jax.checkpoint import Tokenizer, files, load, save, weights
from dms_jax.errors import CheckpointError, ConfigError, DataError, DmsJaxError
from dms_jax.generation import generate
from dms_jax.policies import Vanilla
from tests.checkpoint.support import copy, edit_config, rewrite, tensors

# All files that loading may read.
READ = [
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
]


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


def make_way(directory, name):
    """Removes this file, and every file that would be read in its place."""
    if name == "model.safetensors.index.json":
        (directory / "model.safetensors").unlink()
    if name in ("tokenizer.model", "vocab.json", "merges.txt"):
        (directory / "tokenizer.json").unlink()
    (directory / name).unlink(missing_ok=True)
    return directory / name


def refusal(directory):
    with pytest.raises(CheckpointError) as error:
        load(directory)
    return str(error.value)


KINDS = {
    "device": "a link that leaves the checkpoint directory",
    "pipe": "is a pipe",
    "directory": "is a directory, not a file",
    "secret": "a link that leaves the checkpoint directory",
    "absolute": "a link that leaves the checkpoint directory",
    "circle": "in a circle",
    "nothing": "that is not there",
    "too large": "has more than the",
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", KINDS)
def test_foreign_files_are_refused(saved, tmp_path, kind):
    (tmp_path / "secret").write_text("-----BEGIN PRIVATE KEY-----")
    for name in READ:
        if (kind, name) == ("too large", "model.safetensors"):
            continue
        file = make_way(shutil.copytree(saved, tmp_path / name), name)
        if kind == "pipe":
            os.mkfifo(file)
        elif kind == "directory":
            file.mkdir()
        elif kind == "too large":
            file.touch()
            os.truncate(file, files.MAX_VOCABULARY_BYTES + 1)
        else:
            target = {
                "device": "/dev/zero",
                "secret": "../secret",
                "absolute": str(tmp_path / "secret"),
                "circle": name,
                "nothing": "absent",
            }[kind]
            file.symlink_to(target)
        told = refusal(file.parent)
        assert KINDS[kind] in told
        assert name in told


def hub_cache(directory, tmp_path):
    """The directory as huggingface_hub lays it out: (repository, snapshot)."""
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in directory.iterdir():
        file.rename(repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", file.name))
    return repository, snapshot


def test_hub_cache_with_shared_blobs(stories, tmp_path):
    repository, snapshot = hub_cache(stories, tmp_path)
    shared = tmp_path / "hub" / "blobs"
    (shared / "ab").mkdir(parents=True)
    blob = repository / "blobs" / "model.safetensors"
    blob.rename(shared / "ab" / "abcd")
    blob.symlink_to(os.path.join("..", "..", "blobs", "ab", "abcd"))
    with pytest.raises(CheckpointError, match="link that leaves"):
        load(snapshot)
    (shared / ".huggingface-shared-blobs").write_text("1\n")
    assert load(snapshot).tokenizer is not None


@pytest.mark.parametrize("which", ["own", "shared"])
def test_linked_blobs_folder_is_refused(stories, tmp_path, which):
    repository, snapshot = hub_cache(stories, tmp_path)
    assert load(snapshot).tokenizer is not None
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".huggingface-shared-blobs").write_text("1\n")
    (repository / "blobs" / "config.json").rename(tmp_path / "home" / "config.json")
    if which == "own":
        (repository / "blobs").rename(repository / "other")
        (repository / "blobs").symlink_to(tmp_path / "home")
    else:
        (tmp_path / "hub" / "blobs").symlink_to(tmp_path / "home")
        (repository / "blobs" / "config.json").symlink_to("../../blobs/config.json")
    with pytest.raises(CheckpointError, match="link that leaves"):
        load(snapshot)


def test_template_in_a_config_is_bounded(stories):
    (stories / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x" * 2_000_000}))
    with pytest.raises(CheckpointError, match="chat_template is longer"):
        load(stories)


@pytest.mark.parametrize("name", ["chat_template.jinja", "merges.txt"])
def test_text_that_is_not_utf8_is_refused(stories, name):
    if name == "merges.txt":
        make_way(stories, "vocab.json").write_text("{}")
    (stories / name).write_bytes(b"\xff\xfe{{ 1 }}")
    with pytest.raises(CheckpointError, match=f"{name} is not text in UTF-8"):
        load(stories)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", r'{"model_type": "llama", "x": "\ud800"}'),
        ("generation_config.json", r'{"\udc00": 1}'),
        ("tokenizer_config.json", r'{"chat_template": "a\uD83D"}'),
        ("special_tokens_map.json", r'{"eos_token": "\udfff\ud800"}'),
    ],
)
def test_half_a_surrogate_pair_in_a_file_is_refused(stories, name, content):
    (stories / name).write_text(content)
    with pytest.raises(CheckpointError, match="half of a surrogate pair"):
        load(stories)
    (stories / name).write_text(r'{"x": "\ud83d\ude00 \\ud800"}')  # a whole one, and none
    if name != "config.json":
        load(stories)


def test_half_a_surrogate_pair_in_a_text_is_refused(stories):
    model = load(stories)
    with pytest.raises(DataError, match=r"half of a surrogate pair \('\\ud83d' at place 3\)"):
        model.tokenizer.encode("abc\ud83d")
    model.tokenizer.chat_template = "{{ messages[0].content }}\ud800"
    assert model.tokenizer.apply_chat_template([{"role": "user", "content": "é"}]) == "é\ud800"
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json.*half of a surrogate pair"):
        save(model, Vanilla(), stories)
    assert load(stories).tokenizer.chat_template is None


@pytest.mark.parametrize("prompt", ["b\udfff", [{"role": "user", "content": "b\udfff"}]])
def test_half_a_surrogate_pair_in_a_prompt_is_refused(stories, prompt):
    model = load(stories)
    model.tokenizer.chat_template = "{{ messages[0].content }}"
    with pytest.raises(DataError, match=r"Prompt 1: .*half of a surrogate pair \('\\udfff'"):
        generate(model, ["a", prompt])


@pytest.mark.parametrize("ids", [[-1], [2**32], [1, 2**70]])
def test_impossible_token_ids_are_refused(stories, ids):
    with pytest.raises(DataError, match="token ids to decode must lie in"):
        load(stories).tokenizer.decode(ids)


_PADDING = {
    "strategy": {"Fixed": 10**18},
    "direction": "Right",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "x",
}
_TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    ("field", "value", "stage"),
    [
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}, "load"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "BAAAAP////8="}, "encode"),
        ("normalizer", {"type": "Precompiled", "precompiled_charsmap": ""}, "load"),
        ("pre_tokenizer", {"type": "FixedLength", "length": 0}, "encode"),
        (
            "normalizer",
            {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "x"},
            "encode",
        ),
        (
            "post_processor",
            _TEMPLATE | {"single": [{"SpecialToken": {"id": "x", "type_id": 0}}]},
            "load",
        ),
        (
            "post_processor",
            _TEMPLATE | {"single": [{"Sequence": {"id": "B", "type_id": 0}}]},
            "load",
        ),
        ("model", {"type": "Unigram", "unk_id": None, "vocab": []}, "encode"),
        ("continuing_subword_prefix", "é", "load"),
        ("padding", _PADDING, None),  # dropped before anything is encoded
    ],
)
def test_tokenizer_panics_become_errors(stories, field, value, stage):
    file = stories / "tokenizer.json"
    content = json.loads(file.read_text())
    (content["model"] if field == "continuing_subword_prefix" else content)[field] = value
    file.write_text(json.dumps(content))
    declared = {} if field == "model" else {"add_bos_token": True, "bos_token": "<s>"}
    (stories / "tokenizer_config.json").write_text(json.dumps(declared))
    if stage == "load":
        with pytest.raises(CheckpointError, match="tokenizer"):
            Tokenizer.from_directory(stories)
        return
    tokenizer = Tokenizer.from_directory(stories)
    if stage == "encode":
        with pytest.raises(DataError, match="the tokenizer failed on the text"):
            tokenizer.encode("a" * 40 + "b")
    else:
        assert len(tokenizer.encode("a")) < 5


def test_panic_while_decoding_or_writing_is_converted(stories, tmp_path, monkeypatch):
    class PanicException(BaseException):
        pass

    class Broken:
        def __getattr__(self, name):
            def panic(*arguments, **options):
                raise PanicException("index out of bounds")

            return panic

    tokenizer = Tokenizer.from_directory(stories)
    tokenizer.backend = Broken()
    with pytest.raises(DataError, match="library failed: index out of bounds"):
        tokenizer.decode([1])
    with pytest.raises(CheckpointError, match="library failed: index out of bounds"):
        tokenizer.save(tmp_path)


def test_interrupt_while_encoding_is_not_converted(stories):
    class Interrupted:
        def encode(self, *arguments, **options):
            raise KeyboardInterrupt

    tokenizer = Tokenizer.from_directory(stories)
    tokenizer.backend = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")


def test_empty_tokenizer(tmp_path):
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_directory(tmp_path).vocab_size == 0


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (10**400, "no token of the model"),
        (-2, "no token of the model"),
        (list(range(5000)), "lists 5000 tokens, more than the 64"),
        (True, "must be a token id"),
        ([[1]], "must be a token id"),
    ],
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


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        *((each, "give one of float16, bf") for each in ("float8_e4m3fn", jnp.float8_e5m2, "c8")),
        *((each, "is not known") for each in (["x"], object(), "V99999999999999", "\x1b[")),
    ],
)
def test_unserved_dtype_is_refused(llama, dtype, message):
    with pytest.raises(ConfigError, match=message) as refusal:
        load(llama, dtype=dtype)
    assert str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "SnapKV", "kernel": 10**9 + 1}, "kernel"),
        ({"name": "\x1b]0;title\x07" + "x" * 900_000}, "Unknown cache policy"),
        ({"name": "TOVA", "\x1b[2J" * 1000: 1}, "no option"),
    ],
)
def test_policies_of_a_config_are_bounded(llama, fields, message):
    edit_config(llama, cache_policy=fields)
    with pytest.raises(ConfigError, match=message) as refusal:
        load(llama)
    assert_can_be_shown(refusal.value)


def assert_can_be_shown(error: DmsJaxError) -> None:
    message = str(error)
    assert len(message) <= 20_000
    assert message.replace("\n", "").isprintable()
    message.encode("utf-8")


def test_names_of_tensors_do_not_write_to_the_terminal(llama):
    content = tensors(llama)
    for number in range(500):
        content[f"\x1b[31m{number}\n\u202e" + "x" * 19_000] = np.zeros(1, np.float32)
    rewrite(llama, content)
    with pytest.raises(CheckpointError, match="500 problems") as refusal:
        load(llama)
    assert_can_be_shown(refusal.value)
    assert "and 340 more" in str(refusal.value)
    assert "\\x1b[31m" in str(refusal.value)


@pytest.mark.parametrize("folder", ["", "a/b/c/"])
def test_index_of_many_files_is_refused_in_linear_time(folder, tmp_path):
    """40 s of 100,000 names are 8 s of 20,000."""
    names = {f"t{place}": f"{folder}model-{place}.safetensors" for place in range(20_000)}
    (tmp_path / weights.INDEX).write_text(json.dumps({"weight_map": names}))
    start = time.thread_time()
    with pytest.raises(CheckpointError, match="lacks 20000 of 20000 files") as refusal:
        weights.tensor_files(tmp_path)
    assert time.thread_time() - start < 2
    assert len(str(refusal.value)) < 2000


def test_file_of_too_many_tensors_is_refused(llama, monkeypatch):
    monkeypatch.setattr(weights, "_MAX_TENSORS", 5)
    with pytest.raises(CheckpointError, match=r"tensors, more than the 5 that a model can have"):
        load(llama)


def test_shape_of_many_dimensions_is_refused(llama):
    name = "x" * 30
    header = json.dumps({name: {"dtype": "F32", "shape": [1] * 10**6, "data_offsets": [0, 4]}})
    data = struct.pack("<Q", len(header)) + header.encode() + b"\0" * 4
    (llama / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"unexpected: x+ ") as refusal:
        load(llama)
    assert_can_be_shown(refusal.value)


def test_messages_are_short_and_printable_whatever_they_quote():
    for text in ("\x1b[31m" * 10**6, "\ud800", "a\r\nb\tc\0", "\u202e", "x" * 10**7):
        assert_can_be_shown(CheckpointError(text))
    assert str(CheckpointError("a\nb")) == "a\nb"
    assert str(CheckpointError("begin" + "x" * 10**6 + "what to do")).endswith("what to do")
    assert str(ConfigError()) == ""
