"""Loading: formats, the hub, dtypes, meshes, and every kind of damage."""

import collections
import json
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
from dms_jax.checkpoint import load, load_parameters
from dms_jax.checkpoint.weights import Weights
from dms_jax.errors import CheckpointError, ConfigError
from dms_jax.policies import TOVA, Vanilla
from tests.checkpoint.support import GOLDEN, copy, edit_config, rewrite, tensors

INDEX = "model.safetensors.index.json"
FAMILIES = ("qwen3", "llama31", "phi3", "gpt_oss", "gpt_oss_mxfp4", "qwen3_moe")


@pytest.fixture
def llama(tmp_path):
    return copy("families/llama31", tmp_path / "llama")


@pytest.fixture
def sharded(tmp_path):
    return copy("families/qwen3", tmp_path / "qwen3")


def parameters(model) -> dict:
    state = nnx.to_flat_state(nnx.state(model.transformer, nnx.Param))
    return {path: param.get_value() for path, param in state}


def test_one_message_names_every_problem(llama):
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


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:100],
        lambda data: data[:-4],
        lambda data: struct.pack("<Q", 2**62) + data[8:],
    ],
)
def test_damaged_safetensors_file_is_refused(llama, damage):
    file = llama / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load(llama)


def index_of(name) -> str:
    return json.dumps({"weight_map": {"model.norm.weight": name}})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "not a JSON object"),
        ("{}", "no weight_map"),
        ('{"weight_map": {}}', "no weight_map"),
        (index_of(3), "must be a text"),
        (index_of(""), "must be a text"),
        (index_of("absent.safetensors"), "lacks 1 of 1 files"),
        *(
            (index_of(name), "points outside the checkpoint directory")
            for name in ("/etc/passwd", "../model.safetensors", "a/../../model", "..\\m", "m\0")
        ),
    ],
)
def test_damaged_index_is_refused(sharded, content, message):
    (sharded / INDEX).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        load(sharded)


def test_tensor_in_two_shards_is_refused(sharded):
    first, second = sorted(sharded.glob("*.safetensors"))
    second.write_bytes(first.read_bytes())
    with pytest.raises(CheckpointError, match="is in both"):
        load(sharded)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_nan_and_infinity_are_refused(llama, value, dtype):
    content = {name: x.astype(dtype) for name, x in tensors(llama).items()}
    rewrite(llama, content)
    assert load(llama).dtype == dtype
    content["model.layers.1.self_attn.k_proj.weight"][3, 5] = value
    rewrite(llama, content)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        load(llama)


def test_overflow_of_the_dtype_is_refused(llama):
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
        b"[1, 2]",
    ],
)
def test_garbage_config_is_refused(llama, content):
    (llama / "config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        load(llama)
    assert "config.json" in str(refusal.value)
    assert len(str(refusal.value)) < 500


def test_missing_checkpoint_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no directory"):
        load(tmp_path / "absent")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="is a file"):
        load(tmp_path / "file")
    with pytest.raises(CheckpointError, match=r"config\.json does not exist; a .* holds config"):
        load(tmp_path)


@pytest.mark.parametrize("place", ["model", "training/model"])
def test_folder_of_a_run_names_its_model(place, tmp_path):
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


def test_unknown_architecture_is_refused(llama):
    edit_config(llama, model_type="mixtral", architectures=["MixtralForCausalLM"])
    with pytest.raises(ConfigError, match="MixtralForCausalLM"):
        load(llama)


def test_pickled_weights_are_refused(llama):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read"):
        load(llama)


def test_quantized_tensor_is_refused(llama):
    content = tensors(llama)
    name = "model.layers.0.mlp.gate_proj.weight"
    content[name] = content[name].astype(np.int8)
    rewrite(llama, content)
    with pytest.raises(CheckpointError, match="has dtype I8; supported: "):
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
        ("models/model.safetensors", "file"),
        ("/models/missing", "directory or file"),
        ("./missing", "directory or file"),
        ("~/missing", "directory or file"),
        (pathlib.Path("models/missing"), "directory or file"),
    ],
)
def test_path_is_not_looked_up_on_the_hub(path, kind, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    absolute = pathlib.Path(path).expanduser().absolute()
    with pytest.raises(CheckpointError) as refused:
        load(path)
    assert str(refused.value) == f"there is no {kind} {absolute}"


def test_local_directory_takes_precedence_over_the_hub(llama, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama, "owner/Model-7B.gguf")
    assert load("owner/Model-7B.gguf").config.num_layers == 2


def test_message_quotes_an_address_as_given():
    """As a path it would have one slash."""
    with pytest.raises(CheckpointError, match=r"file https://huggingface\.co/owner/name, and"):
        load("https://huggingface.co/owner/name")


def test_gguf_repository_says_how_to_fetch_a_file(tmp_path, monkeypatch):
    """GGUF files are not fetched: a repository holds a model many times."""
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
    fields = json.loads((directory / "config.json").read_text())
    edit_config(directory, **{name: None for name in fields if name.startswith("dms_")})
    with pytest.raises(CheckpointError, match="are a DMS adapter: set dms_window_size"):
        load(directory)
    edit_config(directory, cache_policy={"name": "TOVA", "budget": 8})
    model = load(directory)
    assert isinstance(model.policy, TOVA)
    assert model.transformer.has_adapter


def test_missing_adapter_tensors_are_named(tmp_path):
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


def test_plain_checkpoint(llama):
    model = load(str(llama))
    assert model.policy == Vanilla()
    assert model.tokenizer is None
    assert model.mesh is None


@pytest.mark.parametrize("source", ["families/qwen3", "families/llama_biases", "dms/adapter"])
def test_load_onto_a_mesh(source, tmp_path):
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


@pytest.mark.parametrize("source", FAMILIES)
def test_long_tensors_are_read_in_parts(source, monkeypatch):
    whole = parameters(load(GOLDEN / "families" / source))
    reads, read = collections.Counter(), load_parameters.read_tensor
    monkeypatch.setattr(load_parameters, "_RUN", 64)

    def count(weights, layout, *rest):
        reads[layout.name] += 1
        return read(weights, layout, *rest)

    monkeypatch.setattr(load_parameters, "read_tensor", count)
    chex.assert_trees_all_equal(parameters(load(GOLDEN / "families" / source)), whole)
    assert reads["model.embed_tokens.weight"] >= whole["embedding",].size / 64


def test_no_tensor_is_read_twice(sharded, monkeypatch):
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
