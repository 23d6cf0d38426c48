"""Options of tasks are supported or refused, and open turns end with their content."""

import sys

import pytest

from dms_jax.checkpoint.chat import render_chat
from dms_jax.errors import ConfigError, DataError
from dms_jax.evaluation import harness
from dms_jax.evaluation.harness_requests import open_turn, read_sampling
from dms_jax.generation import Sampling


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2"),
        ({"num_beams": 4}, "num_beams=4"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"frequency_penalty": -0.5}, "frequency_penalty"),
        ({"no_repeat_ngram_size": 3}, "no_repeat_ngram_size"),
        ({"num_return_sequences": 2}, "num_return_sequences"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"stop": ["\n"]}, "stop="),
        ({"eos_token_id": 2}, "eos_token_id"),
        ({"max_lenght": 7}, "max_lenght"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "penalty_alpha"),
        ({"max_gen_toks": 7, "max_new_tokens": 8}, "several lengths of answers"),
        ({"until": 3}, "until must be a text"),
        ({"until": [3]}, "until must be a text"),
    ],
)
def test_unsupported_options_are_refused(options, name):
    with pytest.raises(ConfigError, match=name):
        read_sampling({"until": ["\n"], "do_sample": False} | options)


def test_sampling_of_a_task():
    drawn = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "max_new_tokens": 9}
    assert read_sampling(drawn | {"until": "Q:"}) == Sampling(
        temperature=0.6, top_p=0.95, max_new_tokens=9, stop=("Q:",)
    )
    assert read_sampling({"do_sample": False, "temperature": 0.6}).temperature == 0
    plain = {"repetition_penalty": 1.0, "num_beams": 1, "presence_penalty": 0, "top_p": None}
    plain |= {"use_cache": True, "early_stopping": False, "typical_p": 1.0, "until": None}
    assert read_sampling(plain) == Sampling(temperature=0, max_new_tokens=256)
    lengths = {"max_gen_toks": 9, "max_new_tokens": 9}
    assert read_sampling(lengths).max_new_tokens == 9


class Written:
    def __init__(self, template):
        self.template = template

    def apply_chat_template(self, messages, add_generation_prompt=True, **variables):
        return render_chat(
            self.template,
            messages=messages,
            add_generation_prompt=add_generation_prompt,
            **variables,
        )


PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
TRIMS = PLAIN.replace("m.content", "m.content | trim")
THINKS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}</s>{% endfor %}"
)
ENDS = "{% for m in messages %}<{{ m.role }}>{{ m.content }} </s>\n{% endfor %}"


@pytest.mark.parametrize(
    ("template", "content", "open_text"),
    [
        # What transformers 5.24 gives for continue_final_message=True.
        (PLAIN, "The answer is ", "The answer is "),
        (TRIMS, "The answer is ", "The answer is"),
        (TRIMS, "The answer is", "The answer is"),
        (PLAIN, "", ""),
        (TRIMS, "", ""),
        (PLAIN, "s", "s"),
        (TRIMS, "s", "s"),
        (PLAIN, "</s>", "</s>"),
        (ENDS, "", ""),
        (ENDS, "2+2", "2+2"),
        (TRIMS, "a\n\n", "a"),
        (PLAIN, "a\n\n", "a\n\n"),
        (
            PLAIN,
            [{"type": "text", "text": "The answer"}, {"type": "text", "text": " is"}],
            "The answer is",
        ),
        (PLAIN, "(the turn goes on here)", "(the turn goes on here)"),
    ],
)
def test_open_turn(template, content, open_text):
    messages = [{"role": "user", "content": "s 2+2?"}, {"role": "assistant", "content": content}]
    begin = render_chat(template, messages=messages[:1])
    assert open_turn(Written(template), messages) == f"{begin}<assistant>{open_text}"


@pytest.mark.parametrize(
    ("template", "messages", "says"),
    [
        (PLAIN, [], "needs a content"),
        (PLAIN, [{"role": "assistant", "content": None}], "has no content"),
        (PLAIN, [{"role": "assistant"}], "has no content"),
        (THINKS, [{"role": "assistant", "content": "<think>so</think>4"}], "leaves out content"),
        ("<s>{{ messages[0].content }}", [{"role": r, "content": r} for r in "ua"], "leaves out"),
    ],
)
def test_open_turn_errors(template, messages, says):
    with pytest.raises(DataError, match=says):
        open_turn(Written(template), messages)


def test_missing_lm_eval_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.models", None)
    with pytest.raises(ConfigError, match=r"lm-eval, which is not installed.*dms-jax\[eval\]"):
        harness.register()
