"""Models with a chat template that reason before they answer, with answers set by a test.

They run on `fake_programs`, so only a model's shape and tokenizer matter. Channel marks are special
tokens, as in gpt-oss.
"""

import dataclasses
import pathlib

import dms_jax
from dms_jax.checkpoint import Tokenizer
from dms_jax.config import ModelConfig
from dms_jax.generation.grammar import Opening

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tokenizers" / "gemma"
MARKERS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 1024,
}
TEMPLATES = {
    # Like gpt-oss's: leaves reasoning out, and refuses markers in a message.
    "channels": """\
{%- for m in messages %}
{%- if '<|channel|>' in m.content %}{{ raise_exception('tags') }}{% endif %}
{%- set channel = '<|channel|>final' if m.role == 'assistant' else '' -%}
<|start|>{{ m.role }}{{ channel }}<|message|>{{ m.content }}<|end|>{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}""",
    # Like Qwen3's, which keeps the reasoning of the last answer.
    "thinks": """\
{%- for m in messages %}
{%- set begun = '<think>\n' + m.reasoning_content + '\n</think>\n\n'
  if m.reasoning_content and loop.last else '' -%}
<{{ m.role }}>{{ begun }}{{ m.content.split('</think>')[-1] }}</{{ m.role }}>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}""",
    "plain": """\
{%- for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}
{%- if add_generation_prompt %}<assistant>{% endif %}""",
}
# An answer in the form of each template, with the same reasoning.
ANSWERS = {
    "channels": "<|channel|>analysis<|message|>Is 4 a sum?\nIt is 5.<|end|>"
    "<|start|>assistant<|channel|>final<|message|>It is 4.\nYes.",
    "thinks": "<think>\nIs 4 a sum?\nIt is 5.\n</think>\n\nIt is 4.\nYes.",
}
THOUGHT, SAID = "Is 4 a sum?\nIt is 5.", "It is 4.\nYes."


def thinking_model(form: str) -> dms_jax.LanguageModel:
    """A model with one of the templates."""
    tokenizer = Tokenizer.from_directory(GOLDEN)
    assert tokenizer is not None
    tokenizer.backend.add_special_tokens(list(MARKERS))
    tokenizer.chat_template = TEMPLATES[form]
    shape = SHAPE | {"vocab_size": tokenizer.vocab_size}
    return dms_jax.initialize(ModelConfig.from_hf(shape), tokenizer=tokenizer)


def saying(model: dms_jax.LanguageModel, text: str, sampling: dms_jax.Sampling) -> dms_jax.Sampling:
    """A sampling that forces an answer, a text in the model's tokens."""
    tokens = model.tokenizer.encode(text, add_special_tokens=False)
    forced = Opening(tuple(tokens))
    return dataclasses.replace(sampling, grammar=forced, max_new_tokens=len(tokens))
