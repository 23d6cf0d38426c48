"""Directories as MaxText's `to_huggingface` and tunix's export of merged adapters lay them out."""

import json

import chex
from flax import nnx
from safetensors.numpy import save_file

from dms_jax.checkpoint import load
from tests.checkpoint.support import copy, tensors


def parameters(model):
    return nnx.to_pure_dict(nnx.state(model.transformer))


def write_shards(directory, content, most):
    """Writes tensors in order of names, in shards of limited size, with the index."""
    shards, sizes = [{}], [0]
    for name, tensor in sorted(content.items()):
        if sizes[-1] + tensor.size > most and shards[-1]:
            shards.append({})
            sizes.append(0)
        shards[-1][name] = tensor
        sizes[-1] += tensor.size
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": 4 * sum(sizes)}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return len(shards)


def test_tunix_export_beside_an_old_index(tmp_path):
    usual = load(copy("families/qwen3", tmp_path / "usual"))
    directory = copy("families/qwen3", tmp_path / "tunix")
    content = tensors(directory)
    write_shards(directory, content, 5_000)
    for shard in directory.glob("model-*.safetensors"):  # it copies all but these
        shard.unlink()
    save_file(content, directory / "model.safetensors")
    chex.assert_trees_all_equal(parameters(load(directory)), parameters(usual))
