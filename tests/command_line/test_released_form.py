"""Documented commands on a tiny random checkpoint of NVIDIA's released form."""

import json
import pathlib
import re
import shlex

import pytest

import dms_jax
from dms_jax.checkpoint.tokenizer import Tokenizer
from dms_jax.command_line import evaluate, generate
from dms_jax.command_line.running import run
from dms_jax.config import ModelConfig
from dms_jax.generation.requests import encode_prompts

PAGE = pathlib.Path(__file__).resolve().parents[2] / "experiments/docs/pages/index.md"
README = pathlib.Path(dms_jax.__file__).parents[1] / "README.md"
# Like Qwen3's: thinking is the default; without it the answer begins after an empty thought.
TEMPLATE = """{%- for message in messages -%}
<{{ message.role }}>{{ message.content }}</{{ message.role }}>
{%- endfor -%}
{%- if add_generation_prompt -%}
<assistant>
{%- if enable_thinking is defined and enable_thinking is false -%}
<think></think>
{%- endif -%}
{%- endif -%}"""
SHAPE = {
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A directory in the form of nvidia/Qwen3-8B-DMS-8x: Qwen3's tensors and two fields of DMS."""
    words = dms_jax.load(dms_jax.assets.path("stories260k")).tokenizer
    tokenizer = Tokenizer(words.backend, chat_template=TEMPLATE)
    model = dms_jax.initialize(ModelConfig.from_hf(SHAPE), tokenizer=tokenizer)
    folder = tmp_path_factory.mktemp("released") / "qwen3-dms"
    dms_jax.save(model, dms_jax.Vanilla(), folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"dms_window_size": 5, "dms_cr": 8}
    (folder / "config.json").write_text(json.dumps(config))
    assert dms_jax.load(folder).policy == dms_jax.DMS(window=5, source="query_neuron", shift=1)
    return folder


def of_page(script: str, checkpoint, page=PAGE, **other: str) -> list[str]:
    """Returns the arguments of a page's command for NVIDIA's model, with some replaced."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    line = re.search(rf"dms-jax {script} (--model nvidia/.*)", text)[1]
    arguments = shlex.split(line, comments=True)
    other = {"--model": str(checkpoint), "--dtype": "float32", **other}
    for option, value in other.items():
        arguments[arguments.index(option) + 1] = value
    return arguments


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize(
    ("thinks", "begins", "page"),
    [("true", "<assistant>", PAGE), ("false", "</think>", PAGE), ("true", "<assistant>", README)],
)
def test_template_variable_reaches_the_prompt(
    checkpoint, thinks, begins, page, monkeypatch, capsys
):
    read, answer = [], dms_jax.generate

    def generate_few(model, prompts, **options):
        assert model.policy.name == "DMS"
        tokens = encode_prompts(model, prompts)
        read.extend(model.tokenizer.decode(each, skip_special_tokens=False) for each in tokens)
        return answer(model, prompts, **options)

    monkeypatch.setattr(dms_jax, "generate", generate_few)
    own = {"--template": f"enable_thinking={thinks}", "--max-new-tokens": "12"}
    arguments = of_page("generate", checkpoint, page, **own)
    assert run(generate.main, generate.Config, description=None, arguments=arguments) == 0
    (prompt,) = read
    assert prompt.strip().startswith("<user>Prove that ...</user>")
    assert prompt.endswith(begins)
    assert "DMS: " in capsys.readouterr().out


@pytest.mark.usefixtures("fakes")
def test_template_variable_reaches_the_problems(checkpoint, tmp_path, monkeypatch):
    problems = tmp_path / "test.jsonl"
    problems.write_text(json.dumps({"question": "1 + 1?", "answer": "#### 2"}) + "\n")
    own = {"--task-options": f"path={problems}", "--max-new-tokens": "12"}
    arguments = [*of_page("evaluate", checkpoint, **own), "--out", str(tmp_path / "out.json")]
    seen = []
    monkeypatch.setattr(
        evaluate, "evaluate", lambda *a, **o: seen.append(o["chat"]) or _evaluate(*a, **o)
    )
    assert run(evaluate.main, evaluate.Config, description=None, arguments=arguments) == 0
    assert [dict(chat.variables) for chat in seen] == [{"enable_thinking": True}]
    figures = json.loads((tmp_path / "out.json").read_text())
    assert "dms" in json.dumps(figures).lower()


_evaluate = evaluate.evaluate
