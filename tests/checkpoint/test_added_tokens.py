"""Every declared token joins the vocabulary, and no end token is appended to a text."""

import json
import pathlib

import pytest

from dms_jax import assets, load
from dms_jax.checkpoint import Tokenizer
from dms_jax.errors import CheckpointError
from dms_jax.evaluation.likelihood import encode_pair
from tests.checkpoint.support import copy
from tests.checkpoint.tokenizer_layouts import ends, entry, fast, size, write


def stories(target: pathlib.Path, **fields) -> pathlib.Path:
    """The shipped model with other fields in its tokenizer_config.json."""
    source = pathlib.Path(assets.path("stories260k"))
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = target / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | fields))
    return target


def read(directory: pathlib.Path) -> Tokenizer:
    tokenizer = Tokenizer.from_directory(directory)
    assert tokenizer is not None
    return tokenizer


def test_context_gets_no_end_token(tmp_path):
    model = load(stories(tmp_path / "model", tokenizer_class="LlamaTokenizer", add_eos_token=True))
    usual = load(assets.path("stories260k"))
    for context, continuation in (("Once upon", " a time"), ("Answer:", " A"), ("", "Once")):
        assert encode_pair(model, context, continuation) == encode_pair(
            usual, context, continuation
        )
    context, continuation = encode_pair(model, "Once upon", " a time")
    whole = model.tokenizer.encode("Once upon a time")
    assert (*context, *continuation) == tuple(whole)
    assert model.tokenizer.eos_token_id not in whole


BEGIN, END = size("gpt2"), size("gpt2") + 1


@pytest.mark.parametrize(
    ("added", "begins"),
    [
        ({}, []),
        ({"back": ("<e>", END)}, []),
        ({"front": ("<b>", BEGIN)}, [BEGIN]),
        ({"front": ("<b>", BEGIN), "back": ("<e>", END)}, [BEGIN]),
        ({"front": ("<e>", END), "back": ("<e>", END)}, [END]),
    ],
)
def test_encode_adds_only_begin_tokens_of_post_processor(added, begins, tmp_path):
    tokens = [(BEGIN, "<b>"), (END, "<e>")]
    layout = fast("gpt2", tokens, post_processor=ends(added) if added else None)
    write(tmp_path / "model", {"tokenizer.json": layout})
    tokenizer = read(tmp_path / "model")
    for text in ("", "Hello", "Hello<e>", "<b>Hello<e><e>"):
        assert tokenizer.encode(text) == [*begins, *tokenizer.encode(text, False)]
    assert tokenizer.encode("Hello<e>")[-1] == END  # end tokens in the text itself stay


def test_token_without_an_id_gets_the_next_one_with_a_warning(tmp_path):
    layout = {"tokenizer.json": fast("gpt2"), "tokenizer_config.json": {"eos_token": "<stop>"}}
    write(tmp_path / "model", layout)
    with pytest.warns(UserWarning, match=f"'<stop>' {BEGIN}"):
        tokenizer = read(tmp_path / "model")
    assert tokenizer.encode("Hello<stop>")[-1] == tokenizer.eos_token_id == BEGIN


def test_token_with_two_ids(tmp_path):
    decoder = {"added_tokens_decoder": {str(END): entry("<b>")}}
    layout = {"tokenizer.json": fast("gpt2", [(BEGIN, "<b>")]), "tokenizer_config.json": decoder}
    write(tmp_path / "beside", layout)
    with pytest.warns(UserWarning, match=f"the id {BEGIN}, and the files beside it say {END}"):
        tokenizer = read(tmp_path / "beside")
    assert tokenizer.encode("<b>") == [BEGIN]
    write(tmp_path / "alone", layout | {"tokenizer.json": fast("gpt2")})
    with pytest.raises(CheckpointError, match=f"should have id {END}"):
        read(tmp_path / "alone")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("added_tokens.json", {"<a>": "1"}, "must have an id of 0 or more"),
        ("added_tokens.json", {"<a>": -1}, "must have an id of 0 or more"),
        ("special_tokens_map.json", {"eos_token": 3}, "special_tokens_map.json: eos_token must"),
        ("tokenizer_config.json", {"additional_special_tokens": 3}, "must be a list of tokens"),
        ("tokenizer_config.json", {"extra_special_tokens": [3]}, "must be a text"),
    ],
)
def test_damaged_declarations_are_named(name, content, message, tmp_path):
    write(tmp_path / "model", {"tokenizer.json": fast("gpt2"), name: content})
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "model")


@pytest.mark.parametrize(
    ("generation", "config", "own", "expected"),
    [
        ([7], 9, "<s>", (7, 9, 1)),
        (None, None, "</s>", (2,)),
        ([2, 7], [7, 2], "</s>", (2, 7)),
        (-1, None, None, ()),
        (5, -1, None, (5,)),
    ],
)
def test_end_tokens_of_all_files_end_an_answer(generation, config, own, expected, tmp_path):
    target = stories(tmp_path / "model", eos_token=own)
    for name, value in (("generation_config.json", generation), ("config.json", config)):
        fields = json.loads((target / name).read_text())
        (target / name).write_text(json.dumps(fields | {"eos_token_id": value}))
    assert load(target).generation.eos_token_ids == expected


@pytest.mark.parametrize("place", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id", "pad_token_id"])
def test_ids_outside_the_vocabulary_are_refused(place, name, tmp_path):
    target = copy("families/llama2", tmp_path / "model")
    file = target / place
    fields = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(fields | {name: [2, 61]}))
    with pytest.raises(CheckpointError, match=rf"{place}: {name} is 61, .*vocabulary of 61"):
        load(target)


def test_end_token_outside_the_vocabulary_is_refused(tmp_path):
    target = stories(tmp_path / "model", eos_token="<|x|>")
    (target / "added_tokens.json").write_text('{"<|x|>": 512}')
    with pytest.raises(CheckpointError, match=r"Set eos_token of tokenizer_config\.json"):
        load(target)


@pytest.mark.parametrize("empty", ["", {"content": ""}])
def test_empty_text_is_not_a_token(empty, tmp_path, recwarn):
    config = {"pad_token": empty, "additional_special_tokens": [empty], "image_token": ""}
    layout = {"tokenizer.json": fast("gpt2"), "tokenizer_config.json": config}
    write(tmp_path / "model", layout)
    assert read(tmp_path / "model").special_tokens == {}
    assert not recwarn.list
