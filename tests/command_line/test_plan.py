"""`dms-jax plan`: the shape, the retrofit, and the file."""

import json

import pytest

import dms_jax
from dms_jax import assets
from dms_jax.command_line import plan
from dms_jax.command_line.shapes import SHAPES
from tests.checkpoint import gguf_files
from tests.training.test_planning import planned


def test_published_numbers_of_parameters():
    billions = {
        "llama-3.2-1b": 1.24,
        "llama-2-7b": 6.74,
        "llama-3.1-8b": 8.03,
        "llama-3.1-70b": 70.55,
        "qwen-r1-1.5b": 1.78,
        "qwen-r1-7b": 7.62,
        "qwen-r1-32b": 32.76,
        "qwen3-8b": 8.19,
    }
    for name, published in billions.items():
        shape = SHAPES[name]
        embedding = shape.vocab_size * shape.hidden_size * (1 if shape.tie_embeddings else 2)
        heads = shape.num_heads + 2 * shape.num_kv_heads
        attention = shape.hidden_size * shape.head_dim * (heads + shape.num_heads)
        layer = attention + 3 * shape.hidden_size * shape.intermediate_size
        count = (embedding + shape.num_layers * layer) / 1e9
        assert count == pytest.approx(published, rel=4e-3), name


def test_options_select_recipe_and_policy():
    config = plan.Config(paper_model="qwen-r1-7b", steps=110, trainable="all")
    assert config.make_recipe().total_steps(config.make_policy()) == 110
    assert config.make_policy() == dms_jax.DMS(window=16)
    assert config.make_recipe().remat == "auto"


def test_shape_may_come_from_a_directory(tmp_path):
    shape = plan.shape_of(str(assets.path("stories260k")))
    assert shape == dms_jax.load(assets.path("stories260k")).config
    assert plan.shape_of("stories260k") == shape
    assert plan.shape_of("reasoner-11m-dms") == plan.shape_of("reasoner-11m")
    with pytest.raises(dms_jax.ConfigError, match=r"none of the shapes llama.*ships \(stories"):
        plan.shape_of("llama-9")
    gguf_files.convert(assets.path("stories260k"), tmp_path / "stories.gguf")
    found = plan.shape_of(str(tmp_path / "stories.gguf"))
    assert (found.hidden_size, found.num_layers) == (shape.hidden_size, shape.num_layers)
    with pytest.raises(dms_jax.ConfigError, match=r"no config.json in it; a checkpoint directory"):
        plan.shape_of(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(dms_jax.ConfigError, match=r"config\.json is not JSON"):
        plan.shape_of(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(machine=("8xh200", "9xh900")), "There is no machine"),
        (dict(machine=("8xh200", "9xh200"), model_shards=8), "9 devices, which `model_shards=8`"),
        (dict(model_shards=0), "model_shards must be"),
        (dict(sequence_shards=8, sequence_length=100, batch_size=1), "100 tokens cannot be split"),
        (dict(batch_size=3), "a batch of 3 does not divide"),
        (dict(sequence_length=10, options=("window=16",)), "No token leaves a window of 16"),
    ],
)
def test_impossible_plans_print_nothing(options, message, capsys):
    with pytest.raises(dms_jax.ConfigError, match=message):
        plan.main(plan.Config(**options))
    assert capsys.readouterr() == ("", "")


def test_plans_are_written_to_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(plan, "plan", lambda *_, **options: planned())
    out = tmp_path / "figures" / "plans.json"
    plan.main(plan.Config(machine=("8xh200", "8xh200"), out=out))
    assert capsys.readouterr().out.count("Memory a device, GB") == 2
    data = json.loads(out.read_text())
    assert {"command", "date", "versions", "config"} <= data.keys()
    assert data["device"] == "none: computed"
    one, other = data["plans"]
    assert one == other
    assert one["report"] == str(planned()).splitlines()
    assert (one["model"], one["machine"]) == ("llama-3.2-1b", "8xh200")
    assert one["mesh"] == {"data": 8, "model": 1}
    assert one["seconds"] == pytest.approx(4600)
    assert [stage["steps"] for stage in one["stages"]] == [2000, 300]
    assert one["stages"][0]["memory"]["temporaries"] == 20e9
