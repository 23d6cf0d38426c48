"""Reserved names of chat template variables are refused everywhere."""

import json

import pytest

import dms_jax
from dms_jax import assets
from dms_jax.evaluation import Chat
from dms_jax.generation import Sampling
from dms_jax.serving.apis import parse_body
from dms_jax.serving.refusals import RefusalError
from dms_jax.serving.rpc import ServedModel

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model():
    loaded = dms_jax.load(assets.path("stories260k"))
    loaded.tokenizer.chat_template = "{{ messages[0].content }}{{ tools }}{{ bos_token }}"
    return loaded


def evaluated(model, variables):
    """The output of an evaluation."""
    chat = Chat(variables=variables)
    return model.tokenizer.apply_chat_template(MESSAGES, **chat.variables)


def told(model, variables):
    """The output of a model with the variables set once."""
    return model.with_template(**variables).tokenizer.apply_chat_template(MESSAGES)


def served(model, variables):
    """The output of a server."""
    fields = {"messages": MESSAGES, "chat_template_kwargs": variables, "max_tokens": 1}
    parsed = parse_body(
        json.dumps(fields).encode(),
        "/v1/chat/completions",
        ServedModel(
            models={"m": None},
            policy="Vanilla",
            config=model.config,
            tokenizer=model.tokenizer,
            max_tokens=8,
            max_requests=1,
            defaults=Sampling(),
            seed=0,
        ),
        seed=0,
    )
    return model.tokenizer.decode(parsed.prompts[0])


WAYS = pytest.mark.parametrize("write", [evaluated, told, served])


@WAYS
@pytest.mark.parametrize("name", ["template", "messages", "add_generation_prompt", "self"])
def test_reserved_variables_are_refused_everywhere(write, name, model):
    with pytest.raises((dms_jax.ConfigError, RefusalError), match=rf": {name} cannot be given"):
        write(model, {name: "x"})


@WAYS
def test_other_variables_reach_the_template(write, model):
    assert write(model, {"tools": "a tool", "bos_token": "!"}).endswith("Hia tool!")


def test_variable_names_are_strings():
    with pytest.raises(dms_jax.ConfigError, match=r"Chat: the names .* are texts, got 1"):
        Chat(variables={1: 2})
