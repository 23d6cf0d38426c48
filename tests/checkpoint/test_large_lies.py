"""Files that name more than a model has are refused in time linear in their size."""

import json
import time

import pytest

from dms_jax.checkpoint import load, weights
from dms_jax.checkpoint.gguf import file as gguf_file
from dms_jax.checkpoint.weights import INDEX, tensor_files
from dms_jax.errors import CheckpointError
from tests.checkpoint.support import copy
from tests.checkpoint.test_gguf_token_types import smol
from tests.checkpoint.test_gguf_tokenizers import read


@pytest.mark.parametrize("folder", ["", "shards/", "a/b/c/"])
def test_an_index_of_many_files(folder, tmp_path):
    """40 s of 100,000 names are 8 s of 20,000."""
    names = {f"t{place}": f"{folder}model-{place}.safetensors" for place in range(20_000)}
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": names}))
    start = time.thread_time()
    with pytest.raises(CheckpointError, match="lacks 20000 of 20000 files") as refusal:
        tensor_files(tmp_path)
    assert time.thread_time() - start < 2
    assert len(str(refusal.value)) < 2000


def test_a_file_of_too_many_tensors(tmp_path, monkeypatch):
    directory = copy("families/llama2", tmp_path / "model")
    monkeypatch.setattr(weights, "_MAX_TENSORS", 5)
    with pytest.raises(CheckpointError, match=r"tensors, more than the 5 that a model can have"):
        load(directory)


def test_a_list_of_too_many_texts(tmp_path, monkeypatch):
    monkeypatch.setattr(gguf_file, "_MAX_STRINGS", 5)
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.tokens is a list of"):
        read(tmp_path, **smol(None))
