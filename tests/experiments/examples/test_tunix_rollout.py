"""Rollouts for tunix: the trainer's log-probabilities, weights in place, refusals."""

import dataclasses
import importlib
import sys
from unittest import mock

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dms_jax
from dms_jax import assets
from dms_jax.model.language_model import GenerationDefaults, LanguageModel
from tests.experiments.examples import stand_in
from tests.support.compilations import Compilations
from tests.support.models import random_model, tiny_config

POLICY = dms_jax.DMS(window=3, alpha_offset=0.0)
PAD = 0
# Of several lengths; the last two are equal.
PROMPTS = [[5, 9, 2, 27, 3, 8], [4] * 11, [7, 1], [7, 1]]
LONGEST, NEW = 12, 20


@pytest.fixture(scope="module", autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def example():
    """The module of the example, over tunix or its stand-in."""
    name = "experiments.examples.tunix_rollout"
    with mock.patch.dict(sys.modules, stand_in.modules()):
        sys.modules.pop(name, None)
        yield importlib.import_module(name)
    sys.modules.pop(name, None)


def tiny_model(seed: int = 0) -> LanguageModel:
    return LanguageModel(
        random_model(tiny_config(), seed=seed), generation=GenerationDefaults((), 1, PAD)
    )


class Ids:
    """A tokenizer of nothing: prompts are token ids."""

    def pad_id(self):
        return PAD

    def eos_id(self):
        return 30


CONFIG = stand_in.RolloutConfig(
    max_tokens_to_generate=NEW, max_prompt_length=LONGEST, temperature=1.0, return_logprobs=True
)
MESH = jax.sharding.Mesh(np.asarray(jax.devices()[:1]), ("fsdp",))


def make(example, config=CONFIG, actor=None, mesh=MESH):
    """Returns a rollout of the tiny model, or of a model that shares weights with an actor."""
    model = tiny_model()
    actor = actor or example.Actor(model, POLICY)
    return example.DmsJaxRollout(
        rollout_actor=actor,
        tokenizer=Ids(),
        mesh=mesh,
        rollout_config=config,
        model=model,
        num_lanes=4,
    )


@pytest.fixture(scope="module")
def rollout(example):
    return make(example)


@pytest.fixture(scope="module")
def output(rollout):
    return rollout.generate(PROMPTS, CONFIG)


def scores(model: LanguageModel, output, policy=POLICY, temperature=1.0) -> list[np.ndarray]:
    """Returns the log-probabilities of answers by `LanguageModel.logits`, one row after another."""
    found = []
    for prompt, answer in zip(PROMPTS, output.tokens, strict=True):
        whole = np.concatenate([prompt, answer]).astype(np.int32)
        padded = np.zeros((1, LONGEST + NEW), np.int32)  # one program for all
        padded[0, : len(whole)] = whole
        logits = np.asarray(model.logits(padded, policy=policy))[0, : len(whole)] / temperature
        logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        places = np.arange(len(prompt) - 1, len(whole) - 1)
        found.append(logits[places, whole[places + 1]])
    return found


def assert_close(some, others, tolerance=1e-5):
    for one, other in zip(some, others, strict=True):
        chex.assert_trees_all_close(np.asarray(one, float), np.asarray(other), atol=tolerance)


def state(arrays) -> nnx.State:
    return nnx.State(jax.tree.map(nnx.Param, arrays))


def padded(output) -> np.ndarray:
    rows = np.full((len(output.tokens), NEW), PAD, np.int32)
    for row, tokens in zip(rows, output.tokens, strict=True):
        row[: len(tokens)] = tokens
    return rows


def test_logprobs_equal_a_whole_pass_under_the_same_evictions(output):
    model = tiny_model()
    assert_close(output.logprobs, scores(model, output))  # float32, as tunix keeps them
    dense = scores(model, output, dms_jax.DMS(window=400, alpha_offset=0.0))
    apart = [np.abs(one - other).max() for one, other in zip(output.logprobs, dense, strict=True)]
    assert max(apart) > 0.1  # they had been evicted


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_trainer_logprobs_from_padded_tokens_match(rollout, output, temperature):
    """Also of an answer with a padding token inside."""
    assert any(PAD in tokens[:-1] for tokens in output.tokens)
    with mock.patch.object(rollout, "_temperature", temperature):
        found = rollout.get_per_token_logps(
            jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(padded(output))
        )
    found = [row[: len(tokens)] for row, tokens in zip(found, output.tokens, strict=True)]
    assert_close(found, scores(tiny_model(), output, temperature=temperature), 1e-9)


def test_output_has_the_layout_of_tunix(rollout, output):
    assert output.logits is None
    assert output.left_padded_prompt_tokens.shape == (len(PROMPTS), LONGEST)
    for row, prompt in zip(output.left_padded_prompt_tokens, PROMPTS, strict=True):
        assert row.tolist() == [PAD] * (LONGEST - len(prompt)) + prompt
    assert [len(tokens) for tokens in output.tokens] == [NEW] * len(PROMPTS)
    assert {tokens.dtype for tokens in output.tokens} == {np.dtype(np.int32)}
    assert rollout.usage.compression_ratio > 1.2
    assert (rollout.pad_id(), rollout.eos_id()) == (PAD, 30)


def test_copies_and_calls_sample_independently_and_repeatably(example, output):
    def tokens(answers):
        return [each.tolist() for each in answers.tokens]

    again = make(example)
    first, second = (tokens(again.generate(PROMPTS, CONFIG)) for _ in range(2))
    assert first == tokens(output)
    assert first[2] != first[3]  # equal prompts
    assert all(one != other for one, other in zip(first, second, strict=True))
    seeded = dataclasses.replace(CONFIG, seed=jnp.asarray(1))
    assert tokens(make(example).generate(PROMPTS, seeded)) == second  # seed 0, one call before


def test_update_in_place_compiles_nothing(example):
    rollout, new = make(example), tiny_model(seed=1)
    rollout.generate(PROMPTS, CONFIG)
    module = rollout.model()
    trained = example.Actor(new, POLICY)
    # Weights as in the trainer: on its mesh, and perhaps in another precision.
    state = jax.device_put(
        jax.tree.map(lambda x: x.astype(jnp.float64), nnx.state(trained, nnx.Param)),
        jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec()),
    )
    answers = []

    def step():
        rollout.update_params(state, (nnx.Param,))
        answers.append(rollout.generate(PROMPTS, CONFIG))

    assert Compilations().of(step) == 0
    assert rollout.model() is module
    assert_close(answers[0].logprobs, scores(new, answers[0]))


@pytest.mark.nightly
def test_mesh_gives_the_same_answers(example, output):
    rollout, new = make(example, mesh=dms_jax.make_mesh(2, 2)), tiny_model(seed=1)
    answers = rollout.generate(PROMPTS, CONFIG)
    assert [each.tolist() for each in answers.tokens] == [each.tolist() for each in output.tokens]
    assert_close(answers.logprobs, output.logprobs)
    update = nnx.state(example.Actor(new, POLICY), nnx.Param)
    rollout.generate(PROMPTS, CONFIG)  # with placements left by programs on a mesh
    rollout.update_params(update)
    answers = rollout.generate(PROMPTS, CONFIG)
    assert_close(answers.logprobs, scores(new, answers))


def test_rollout_never_shares_arrays_with_the_trainer(example):
    """Tunix treats identical arrays as shared, and would never send an update."""
    actor = example.Actor(tiny_model(), POLICY)
    rollout = make(example, actor=actor)
    for _ in range(2):
        pairs = zip(*(jax.tree.leaves(nnx.state(x)) for x in (actor, rollout.model())), strict=True)
        assert all(own is not other for own, other in pairs)
        rollout.update_params(nnx.state(actor))


def test_update_takes_a_part_and_refuses_unknown_parameters(example):
    rollout = make(example)
    before = rollout.model().transformer.layers.mlp.down_proj.kernel[...]
    rollout.update_params(state({"transformer": {"embedding": jnp.ones((31, 16), jnp.float32)}}))
    transformer = rollout.model().transformer
    assert transformer.embedding[...].dtype == jnp.float64
    assert (transformer.embedding[...] == 1).all()
    assert transformer.layers.mlp.down_proj.kernel[...] is before
    for wrong, said in (
        ({"embedding": jnp.ones((31, 16))}, "embedding is not one of its parameters"),
        (
            {"transformer": {"embedding": jnp.ones((30, 16))}},
            r"embedding is float64\[30, 16\], and float64\[31, 16\]",
        ),
    ):
        with pytest.raises(dms_jax.ConfigError, match=said):
            rollout.update_params(state(wrong))


def test_end_tokens_come_from_the_configuration(example):
    ends = list(range(31))
    config = dataclasses.replace(CONFIG, eos_tokens=ends)
    assert {len(each) for each in make(example, config).generate(PROMPTS, config).tokens} == {1}


@pytest.mark.parametrize(
    ("config", "error", "said"),
    [
        (dict(temperature=0.9), dms_jax.ConfigError, "temperature=0.9 is another"),
        (dict(eos_tokens=[3]), dms_jax.ConfigError, r"eos_tokens=\[3\] is not None"),
        (dict(max_prompt_length=10), dms_jax.DataError, "Prompt 1 has 11 tokens"),
    ],
)
def test_unsupported_settings_refused(rollout, config, error, said):
    with pytest.raises(error, match=said):
        rollout.generate(PROMPTS, dataclasses.replace(CONFIG, **config))


def test_sequential_policies_refused(example):
    with pytest.raises(dms_jax.ConfigError, match="TOVA decides from attention weights"):
        example.Actor(tiny_model(), dms_jax.TOVA(budget=8))


def test_tokenizer_encodes_as_the_library(example):
    model = dms_jax.load(assets.path("stories260k"))
    tokenizer = example.Tokenizer(model)
    ids = tokenizer.encode("Once upon a time")
    assert ids == [1, *model.tokenizer.encode("Once upon a time", add_special_tokens=False)]
    assert tokenizer.decode(ids) == "Once upon a time"
    assert (tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.pad_id()) == (1, 2, 0)
    assert example.Tokenizer(model, pad_id=5).pad_id() == 5
