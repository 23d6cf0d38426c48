"""Loading: what is read, and every kind of damage named."""

import json
import os
import pathlib
import shutil
import struct

import chex
import huggingface_hub
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from dms_jax import assets, sharding
from dms_jax.checkpoint import load
from dms_jax.checkpoint.weights import Weights
from dms_jax.errors import CheckpointError, ConfigError
from dms_jax.policies import TOVA, Vanilla
from tests.checkpoint.support import copy, edit_config, rewrite, tensors

INDEX = "model.safetensors.index.json"


@pytest.fixture
def llama(tmp_path):
    return copy("families/llama31", tmp_path / "llama")


@pytest.fixture
def sharded(tmp_path):
    return copy("families/qwen3", tmp_path / "qwen3")


def parameters(model) -> dict:
    state = nnx.to_flat_state(nnx.state(model.transformer, nnx.Param))
    return {path: param.get_value() for path, param in state}


def test_every_problem_in_one_message(llama):
    content = tensors(llama)
    del content["model.layers.1.mlp.up_proj.weight"], content["model.norm.weight"]
    content["model.layers.0.self_attn.extra.weight"] = np.zeros(3, np.float32)
    content["model.layers.2.mlp.up_proj.weight"] = np.zeros((36, 24), np.float32)
    content["lm_head.weight"] = np.zeros((60, 24), np.float32)
    rewrite(llama, content)
    with pytest.raises(CheckpointError) as refusal:
        load(llama)
    message = str(refusal.value)
    assert "5 problems" in message
    assert "missing: model.layers.1.mlp.up_proj.weight [36, 24]" in message
    assert "missing: model.norm.weight [24]" in message
    assert "unexpected: model.layers.0.self_attn.extra.weight [3]" in message
    assert "unexpected: model.layers.2.mlp.up_proj.weight" in message
    assert "mis-shaped: lm_head.weight is [60, 24], the config asks for [61, 24]" in message


@pytest.mark.parametrize("keep", [0, 4, 100, 20_000, -4])
def test_a_file_cut_short(llama, keep):
    file = llama / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(llama)


def test_a_header_that_claims_too_much(llama):
    file = llama / "model.safetensors"
    file.write_bytes(struct.pack("<Q", 2**62) + file.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(llama)


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../other/model.safetensors", "a/../../model.safetensors", "..\\m", "m\0"],
)
def test_a_shard_name_that_leaves_the_directory(sharded, name):
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = name
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="leaves the checkpoint directory"):
        load(sharded)


@pytest.mark.parametrize("folder", ["llama", "qwen3"])
def test_a_link_that_leaves_the_directory(tmp_path, folder):
    directory = copy(
        {"llama": "families/llama31", "qwen3": "families/qwen3"}[folder], tmp_path / folder
    )
    file = sorted(directory.glob("*.safetensors"))[0]
    outside = tmp_path / "outside.safetensors"
    file.rename(outside)
    file.symlink_to(outside)
    with pytest.raises(CheckpointError, match="link that leaves the checkpoint directory"):
        load(directory)


def test_links_of_a_hub_cache_are_followed(llama, tmp_path):
    repository = tmp_path / "models--owner--name"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for file in llama.iterdir():
        file.rename(repository / "blobs" / file.name)
        (snapshot / file.name).symlink_to(os.path.join("..", "..", "blobs", file.name))
    assert load(snapshot).config.num_layers == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "not a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        ('{"weight_map": {"a": 3}}', "must be a text"),
        ('{"weight_map": {"a": ""}}', "must be a text"),
        ('{"weight_map": {"a": "absent.safetensors"}}', "lacks 1 of 1 files"),
    ],
)
def test_a_damaged_index(sharded, content, message):
    (sharded / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load(sharded)


def test_a_tensor_in_two_shards(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="is in both"):
        load(sharded)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_numbers_that_are_none(llama, value, dtype):
    content = {name: x.astype(dtype) for name, x in tensors(llama).items()}
    rewrite(llama, content)
    assert load(llama).dtype == dtype
    content["model.layers.1.self_attn.k_proj.weight"][3, 5] = value
    rewrite(llama, content)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(llama)


def test_numbers_too_large_for_the_dtype(llama):
    content = tensors(llama)
    content["model.embed_tokens.weight"][0, 0] = 1e5
    rewrite(llama, content)
    assert load(llama).dtype == jnp.float32
    with pytest.raises(CheckpointError, match="as float16"):
        load(llama, dtype=jnp.float16)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x80\x04pickle",
        b"{" * 10_000_000,
        b"[" * 500_000,
        b'{"model_type": "llama", "x": "' + b"a" * 10_000_000 + b'"}',
        b"[1, 2]",
    ],
)
def test_a_garbage_config(llama, content):
    (llama / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        load(llama)
    assert "config.json" in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_an_unknown_architecture(llama):
    edit_config(llama, model_type="mixtral", architectures=["MixtralForCausalLM"])
    with pytest.raises(ConfigError, match="MixtralForCausalLM"):
        load(llama)


def test_nothing_there(tmp_path):
    with pytest.raises(CheckpointError, match="no directory"):
        load(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        load(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist$"):
        load(tmp_path)


@pytest.mark.parametrize("place", ["model", "training/model"])
def test_the_folder_of_a_run_is_told_where_its_model_is(place, tmp_path):
    below = tmp_path / place
    below.mkdir(parents=True)
    (below / "dms_adapter.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"; the adapter of this run is in {below}: load it"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match=f"; the adapter of this run is in {below}$"):
        load(assets.path("stories260k"), adapter=tmp_path)
    (below / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=f"; the model of this run is in {below}$"):
        load(tmp_path)


def test_weights_of_another_kind_are_named(llama):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read"):
        load(llama)


def test_a_quantized_tensor_is_refused(llama):
    content = tensors(llama)
    name = "model.layers.0.mlp.gate_proj.weight"
    content[name] = content[name].astype(np.int8)
    rewrite(llama, content)
    with pytest.raises(CheckpointError, match="I8 numbers, which are not served"):
        load(llama)


def test_from_the_hub(llama, monkeypatch):
    asked = {}

    def download(name, *, revision, allow_patterns, ignore_patterns):
        asked.update(name=name, revision=revision, patterns=allow_patterns)
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load("owner/name@v1.0").config.num_layers == 2
    assert (asked["name"], asked["revision"]) == ("owner/name", "v1.0")
    assert not any(pattern.endswith((".py", ".bin", "*")) for pattern in asked["patterns"])

    def fail(name, **options):
        raise ConnectionError("no route\ntry again")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(CheckpointError, match=r"fetched from the hub: no route try again$"):
        load("owner/name")


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("models/missing.gguf", "file"),
        ("models/Missing.GGUF", "file"),
        ("models/model.safetensors", "file"),
        ("/models/missing", "directory or file"),
        ("./missing", "directory or file"),
        ("../models/missing.gguf", "file"),
        ("~/missing", "directory or file"),
        (pathlib.Path("models/missing"), "directory or file"),
    ],
)
def test_what_is_plainly_a_path_is_not_asked_of_the_hub(path, kind, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    absolute = pathlib.Path(path).expanduser().absolute()
    with pytest.raises(CheckpointError) as refused:
        load(path)
    what, _, hint = str(refused.value).partition("; ")
    assert what == f"there is no {kind} {absolute}"
    # A repository may have the name of a file.
    named = isinstance(path, str) and path[0].isalpha()
    meant = f"if a repository on the hub has this name, give its revision: {path}@main"
    assert hint == (meant if named else "")


@pytest.mark.parametrize("name", ["owner/Model-7B.gguf", "owner/model.safetensors"])
def test_a_repository_with_the_name_of_a_file_is_called_with_its_revision(
    name, llama, monkeypatch, tmp_path
):
    asked = []

    def download(name, *, revision, **options):
        asked.append((name, revision))
        return str(llama)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load(f"{name}@main").config.num_layers == 2
    assert asked == [(name, "main")]
    # What is there is what is meant, whatever its name.
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama, name)
    assert load(name).config.num_layers == 2
    assert len(asked) == 1


def test_an_address_is_told_as_it_was_given():
    """As a path it would have one slash."""
    with pytest.raises(CheckpointError, match=r"file https://huggingface\.co/owner/name, and"):
        load("https://huggingface.co/owner/name")


def test_a_repository_of_gguf_files(tmp_path, monkeypatch):
    """They are not among what is fetched: one repository has a model many times."""
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **options: str(tmp_path))
    with pytest.raises(CheckpointError, match=r"owner/name holds no config\.json.* FILE\.gguf"):
        load("owner/name@main")


def test_dtype_is_that_of_the_files_unless_asked(llama):
    content = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors(llama).items()}
    rewrite(llama, content)
    assert {value.dtype for value in parameters(load(llama)).values()} == {jnp.dtype("bfloat16")}
    wide = parameters(load(llama, dtype=jnp.float32))
    assert {value.dtype for value in wide.values()} == {jnp.dtype("float32")}
    expected = content["model.embed_tokens.weight"].astype(np.float32)
    chex.assert_trees_all_equal(wide["embedding",], expected)


def test_tied_embeddings_with_an_output_matrix(tmp_path):
    directory = copy("families/llama32_tied", tmp_path / "tied")
    content = tensors(directory)
    content["lm_head.weight"] = content["model.embed_tokens.weight"].copy()
    content["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    rewrite(directory, content)
    assert load(directory).transformer.lm_head is None
    content["lm_head.weight"][7, 7] += 1
    rewrite(directory, content)
    with pytest.raises(CheckpointError, match="set tie_word_embeddings to false"):
        load(directory)


def test_adapter_tensors_without_a_policy(tmp_path):
    directory = copy("dms/adapter", tmp_path / "adapter")
    edit_config(
        directory,
        **dict.fromkeys(
            json.loads((directory / "config.json").read_text()).keys()
            & {
                "dms_window_size",
                "dms_separate_alpha",
                "dms_alpha_scale",
                "dms_initial_alpha_offset",
                "dms_alpha_per",
                "dms_tau",
            }
        ),
    )
    with pytest.raises(CheckpointError, match="are a DMS adapter: set dms_window_size"):
        load(directory)
    edit_config(directory, cache_policy={"name": "TOVA", "budget": 8})
    model = load(directory)
    assert isinstance(model.policy, TOVA)
    assert model.transformer.has_adapter


def test_an_adapter_that_is_not_there(tmp_path):
    directory = copy("dms/query_neuron", tmp_path / "neuron")
    edit_config(directory, dms_separate_alpha=True)
    with pytest.raises(CheckpointError) as refusal:
        load(directory)
    assert str(refusal.value).count("dms_proj_alpha") == 4


def test_end_tokens(llama):
    defaults = load(llama).generation
    assert (defaults.bos_token_id, defaults.eos_token_ids, defaults.pad_token_id) == (1, (2,), 0)
    (llama / "generation_config.json").write_text('{"eos_token_id": [7, 9], "pad_token_id": 5}')
    defaults = load(llama).generation
    found = (defaults.bos_token_id, defaults.eos_token_ids, defaults.pad_token_id)
    assert found == (1, (7, 9, 2), 5)  # with that of config.json
    (llama / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(CheckpointError, match="eos_token_id must be a token id"):
        load(llama)


def test_what_a_plain_checkpoint_gives(llama):
    model = load(str(llama))
    assert model.policy == Vanilla()
    assert model.tokenizer is None
    assert model.mesh is None


@pytest.mark.parametrize("source", ["families/qwen3", "families/llama_biases", "dms/adapter"])
def test_straight_to_the_shards_of_a_mesh(source, tmp_path):
    directory = copy(source, tmp_path / "checkpoint")
    mesh = sharding.make_mesh(4, 2)
    whole, spread = load(directory), load(directory, mesh=mesh)
    assert spread.mesh is mesh
    alone, shared = parameters(whole), parameters(spread)
    chex.assert_trees_all_equal(shared, alone)
    for value in shared.values():
        assert isinstance(value.sharding, jax.sharding.NamedSharding)
    qkv = shared["layers", "attention", "qkv_proj", "kernel"]
    heads = qkv.shape[2]
    # KV heads that the mesh does not divide are held by every device.
    expected = heads // 2 if heads % 2 == 0 else heads
    assert {shard.data.shape[2] for shard in qkv.addressable_shards} == {expected}


def test_nothing_is_read_twice(sharded, monkeypatch):
    read, taken = Weights.read, {}

    def record(self, name, index=(), dtype=None):
        result = read(self, name, index, dtype)
        taken.setdefault(name, []).append(result.nbytes)
        return result

    monkeypatch.setattr(Weights, "read", record)
    load(sharded, mesh=sharding.make_mesh(4, 2))
    sizes = {name: tensor.nbytes for name, tensor in tensors(sharded).items()}
    assert {name: sum(parts) for name, parts in taken.items()} == sizes
    # Heads are cut in the file, each device's half read by itself.
    name = "model.layers.0.self_attn.q_proj.weight"
    assert taken[name] == [sizes[name] // 2] * 2
