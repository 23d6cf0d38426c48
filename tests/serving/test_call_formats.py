"""Parsed reasoning, content and calls do not depend on chunks."""

import dataclasses
import json
import random
import time

import llguidance
import numpy as np
import pytest

from dms_jax.generation import grammar
from dms_jax.generation.answer_readers import AnswerForm, Tool
from dms_jax.generation.answers import Answer, make_reader
from dms_jax.generation.call_formats import FORMATS, format_of
from dms_jax.serving.apis import parse_body
from tests.serving.scripted import TEMPLATES, served_model
from tests.serving.support import stories

TYPED = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "flag": {"type": "boolean"},
    "either": {"type": ["string", "null"]},
    "rows": {"type": "array"},
}
TOOLS = tuple(Tool(name, "", {"type": "object", "properties": TYPED}) for name in "fg")
HERMES = AnswerForm(calls="hermes", tools=TOOLS)
CODER = AnswerForm(calls="qwen3-coder", tools=TOOLS)
LLAMA = AnswerForm(calls="llama3", tools=TOOLS)
MISTRAL = AnswerForm(calls="mistral", tools=TOOLS)
ARGS = AnswerForm(calls="mistral-args", tools=TOOLS)
HARMONY = AnswerForm("channels", calls="harmony", tools=TOOLS, parallel=False)
THINKS = AnswerForm(thinks="yes")
MAY_THINK = AnswerForm(thinks="perhaps")

# The format, the text of an answer; its reasoning, content and calls.
ANSWERS = [
    (HERMES, "only text\n\n", "", "only text\n\n", []),
    (
        HERMES,
        'Let me see.\n<tool_call>\n{"name": "f", "arguments": {"x": {"y": "}</tool_call>\\""}, '
        '"l": [1]}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {"a": 1}, "name": "g"}\n</tool_call>\n',
        "",
        "Let me see.",
        [("f", '{"x": {"y": "}</tool_call>\\""}, "l": [1]}'), ("g", '{"a": 1}')],
    ),
    (
        HERMES,
        '<tool_call>{"name":"f","arguments":{},"meta":{"a":{}}}</tool_call> So.',
        "",
        " So.",
        [("f", "{}")],
    ),
    (HERMES, 'a < b <tool_callx {"x":1} ', "", 'a < b <tool_callx {"x":1} ', []),
    (HERMES, "x <tool_call>\nno</tool_call> y", "", "x <tool_call>\nno</tool_call> y", []),
    (
        HERMES,
        'x <tool_call>\n{"nam": 1}\n</tool_call>',
        "",
        'x <tool_call>\n{"nam": 1}\n</tool_call>',
        [],
    ),
    (
        HERMES,
        '<tool_call>{"name": "f", "arguments": 3}',
        "",
        '<tool_call>{"name": "f", "arguments": 3}',
        [],
    ),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {"a": "inc', "", "", [("f", '{"a": "inc')]),
    (HERMES, '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_c', "", "", [("f", "{}")]),
    (HERMES, '<tool_call>\n{"arguments": {}, "name": "f"}', "", "", [("f", "{}")]),
    (HERMES, '<tool_call>\n{"na', "", '<tool_call>\n{"na', []),
    (
        dataclasses.replace(HERMES, parallel=False),
        '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        "",
        "",
        [("f", "{}")],
    ),
    (
        dataclasses.replace(HERMES, thinks="perhaps"),
        '<think>\nhm\n\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>',
        "hm",
        "",
        [("f", "{}")],
    ),
    (
        CODER,
        "I read.\n<tool_call>\n<function=f>\n<parameter=text>\n<b>1</b>\n\nline\n</parameter>\n"
        "<parameter=n>\n3\n</parameter>\n<parameter=flag>\nTrue\n</parameter>\n"
        '<parameter=either>\n5\n</parameter>\n<parameter=rows>\n[{"a": 1}]\n</parameter>\n'
        "<parameter=other>\n{}\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=g>\n<parameter=either>null</parameter>\n</function>\n</tool_call>",
        "",
        "I read.",
        [
            (
                "f",
                '{"text": "<b>1</b>\\n\\nline", "n": 3, "flag": true, "either": "5", '
                '"rows": [{"a": 1}], "other": {}}',
            ),
            ("g", '{"either": null}'),
        ],
    ),
    (CODER, "<tool_call>\n<function=f>\n</function>\n</tool_call>", "", "", [("f", "{}")]),
    (
        CODER,
        "<tool_call><function=f><parameter=text>a<parameter=n>x</function></tool_call> So.",
        "",
        " So.",
        [("f", '{"text": "a", "n": "x"}')],
    ),
    (CODER, "<tool_call>\n<functio", "", "<tool_call>\n<functio", []),
    (CODER, "<tool_call>\n{} <function=f>", "", "<tool_call>\n{} <function=f>", []),
    (
        CODER,
        "<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=text>\nhal",
        "",
        "",
        [("f", '{"n": 3')],
    ),
    (THINKS, "hm <b>\n\nso\n</think>\n\nYes\n", "hm <b>\n\nso", "Yes\n", []),
    (THINKS, "hm never ends </thin", "hm never ends </thin", "", []),
    (MAY_THINK, "  Hello <think>", "", "  Hello <think>", []),
    (MAY_THINK, "<thi", "", "<thi", []),
    (
        AnswerForm(thinks="perhaps", markers=("[THINK]", "[/THINK]")),
        "[THINK]a[/THINK]b",
        "a",
        "b",
        [],
    ),
    (
        LLAMA,
        '{"name": "f", "parameters": {"x": 1}}; '
        '{"type": "function", "name": "g", "parameters": {}}',
        "",
        "",
        [("f", '{"x": 1}'), ("g", "{}")],
    ),
    (LLAMA, '<|python_tag|>{"name": "f", "parameters": {"x": "1"}}', "", "", [("f", '{"x": "1"}')]),
    (
        LLAMA,
        '{"a": {"b": 1 <|python_tag|>{"name": "f", "parameters": {}}',
        "",
        '{"a": {"b": 1',
        [("f", "{}")],
    ),
    (LLAMA, ' {"answer": {"name": "f"}} done', "", ' {"answer": {"name": "f"}} done', []),
    (LLAMA, '{"name": "Bob", "age": 3}', "", '{"name": "Bob", "age": 3}', []),
    (LLAMA, 'Say {"name": "f"}', "", 'Say {"name": "f"}', []),
    (
        MISTRAL,
        '[TOOL_CALLS] [{"name": "f", "arguments": {"x": "]"}, "id": "abcdefghi"}, {"name": "g", '
        '"arguments": {}}]',
        "",
        "",
        [("f", '{"x": "]"}'), ("g", "{}")],
    ),
    (MISTRAL, "[TOOL_CALLS] what is this", "", "[TOOL_CALLS] what is this", []),
    (MISTRAL, '[TOOL_CALLS] [{"x": 1}]', "", '[TOOL_CALLS] [{"x": 1}]', []),
    (
        ARGS,
        'Sure.[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g{"y": {"z": 2}}',
        "",
        "Sure.",
        [("f", '{"x": 1}'), ("g", '{"y": {"z": 2}}')],
    ),
    (ARGS, '[TOOL_CALLS]f[CALL_ID]123456789[ARGS]{"x": 1}', "", "", [("f", '{"x": 1}')]),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant<|channel|>final<|message|>"
        "Yes\n<|return|>",
        "Hm <b>.",
        "Yes\n",
        [],
    ),
    (
        HARMONY,
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Two.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"x": "<|"}<|call|>',
        "One.\nTwo.",
        "I look.",
        [("f", '{"x": "<|"}')],
    ),
    (
        HARMONY,
        ' to=functions.g<|channel|>commentary json<|message|>{"x": 1',
        "",
        "",
        [("g", '{"x": 1')],
    ),
    (HARMONY, "<|channel|>commentary to=f<|message|>{}", "", "", [("f", "{}")]),
    (
        HARMONY,
        "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>commentary to=functions.g<|message|>{}",
        "",
        "",
        [("f", "{}")],
    ),
    (
        HARMONY,
        "<|channel|>analysis to=browser.search code<|message|>{}<|call|>",
        "{}",
        "",
        [],
    ),
    (
        dataclasses.replace(HARMONY, tools=()),
        "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        "{}",
        "",
        [],
    ),
    (HARMONY, "<|channel|>final<|message|>a <|end of<|end|>", "", "a <|end of", []),
    (HARMONY, "<|channel|>final<|message|>a <|en", "", "a <|en", []),
    (HARMONY, "<|channel|>analysis<|message|>a<|start|>assistant<|channel|>fin", "a", "", []),
    (HARMONY, "Without a header.", "", "Without a header.", []),
    (HARMONY, "<|chan", "", "<|chan", []),
]


def parts(answer):
    return answer.thought, answer.text, [(call.name, call.arguments) for call in answer.calls]


@pytest.mark.parametrize(("form", "text", "thought", "said", "calls"), ANSWERS)
def test_answer_parts_do_not_depend_on_chunks(form, text, thought, said, calls):
    want = thought, said, calls
    assert parts(Answer.of(form, text)) == want
    draw = random.Random(0)
    for sizes in ((1,), (2,), (3,), *[(1, 2, 5, 11)] * 30):
        reader, answer, at = make_reader(form), Answer(), 0
        while at < len(text):
            size = draw.choice(sizes)
            for piece in reader.read(text[at : at + size]):
                answer.add(piece)
            at += size
        for piece in reader.end():
            answer.add(piece)
        assert parts(answer) == want


def test_arguments_are_streamed():
    reader = make_reader(HERMES)
    begun = reader.read('<tool_call>\n{"name": "f", "arguments": {"city": "Par')
    assert [type(piece).__name__ for piece in begun] == ["CallStart", "Arguments"]
    assert reader.read("is")[0].text == "is"


def test_long_parameters_are_scanned_once():
    """Agents write whole files, which must not be rescanned for every token."""
    reader = make_reader(CODER)
    reader.read("<tool_call>\n<function=f>\n<parameter=text>\n")
    start = time.process_time()
    for _ in range(20_000):
        reader.read("word < and ")
    assert time.process_time() - start < 5  # 0.1; 32 if each were searched from its beginning
    *_, written, _ = reader.read("\n</parameter>\n</function>\n</tool_call>")
    assert json.loads(f"{{{written.text}}}")["text"] == "word < and " * 20_000


def test_call_ids_are_unique():
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    first, second = (call.id for call in Answer.of(HERMES, text).calls)
    assert first != second
    assert first.startswith("call_")
    (call,) = Answer.of(MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}]').calls
    assert len(call.id) == 9
    assert call.id.isalnum()


@pytest.mark.parametrize(
    ("template", "model", "form"),
    [
        (TEMPLATES["hermes"], "m", "hermes"),
        (TEMPLATES["llama3"], "m", "llama3"),
        (TEMPLATES["mistral"], "qwen", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}", "m", "mistral-args"),
        ("<tool_call><function={{ name }}>", "m", "qwen3-coder"),
        ("{{ messages }}", "Qwen3-Coder-30B", "qwen3-coder"),
        ("{{ messages }}", "Qwen2.5-0.5B", "hermes"),
        ("{{ messages }}", "Llama-3.2-1B", "llama3"),
        (TEMPLATES["harmony"], "m", "harmony"),
        ("{{ messages }}", "gpt-oss-20b", "harmony"),
        ("{{ messages }}", "gpt", None),
        ("", "", None),
    ],
)
def test_call_format_is_detected(template, model, form):
    assert format_of(template, model) == form


# -- grammars of calls ---------------------------------------------------------------------------


def function(name, properties, *, strict):
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}


CITY, SUM = (
    {"city": {"enum": ["Paris", "Rome"]}},
    {"x": {"type": "integer"}, "y": {"type": "boolean"}},
)
BEGINNINGS = {
    "hermes": "Ok.\n<tool_call>",
    "qwen3-coder": "Ok.\n<tool_call>",
    "llama3": '{"',
    "mistral": "[TOOL_CALLS]",
    "harmony": "<|channel|>commentary",
}
# The beginning of an answer without a call.
PROSE = {
    "harmony": "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    "<|channel|>final<|message|>"
}


def asked(form, *, strict, **fields):
    """A parsed request, and its model's vocabulary for grammars."""
    tokenizer = stories().tokenizer
    template = TEMPLATES.get(form, TEMPLATES["hermes"])
    before, tokenizer.chat_template = tokenizer.chat_template, template
    try:
        served = served_model(form, tokenizer=tokenizer, call_format=form)
        tools = [function("city", CITY, strict=strict), function("sum", SUM, strict=strict)]
        body = dict(messages=[{"role": "user", "content": "Hi"}], tools=tools, **fields)
        path = "/v1/chat/completions"
        parsed = parse_body(json.dumps(body).encode(), path, served, seed=0)
    finally:
        tokenizer.chat_template = before
    return parsed


END = 2


def vocabulary():
    ends = type(stories().generation)(eos_token_ids=(END,))
    return grammar._tokens(dataclasses.replace(stories(), generation=ends))


def walk(source, seed, beginning=""):
    """A random text that a grammar allows after a given beginning."""
    draw, text, tokens = random.Random(seed), [], vocabulary()
    matcher = llguidance.LLMatcher(tokens, source, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    given = tokens.tokenize_str(beginning)
    for _ in range(300):
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little")[:512])
        if END in allowed and not given and (len(allowed) == 1 or draw.random() < 0.5):
            return tokens.decode_str(text)
        token = given.pop(0) if given else int(draw.choice(allowed[allowed != END]))
        assert matcher.consume_token(token), matcher.get_error()
        text.append(token)
    return None


def check_call(call):
    arguments = json.loads(call.arguments)
    if call.name == "city":
        assert arguments in ({"city": "Paris"}, {"city": "Rome"})
    else:
        assert call.name == "sum"
        assert list(arguments) == ["x", "y"]
        assert isinstance(arguments["x"], int)
        assert isinstance(arguments["y"], bool)


@pytest.mark.parametrize("form", sorted(BEGINNINGS))
@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"city", "sum"}),
        ({"type": "function", "function": {"name": "sum"}}, {"sum"}),
    ],
    ids=["any", "named"],
)
@pytest.mark.parametrize("parallel", [True, False])
def test_required_call_is_forced(form, choice, names, parallel):
    options = dict(tool_choice=choice, parallel_tool_calls=parallel)
    options["chat_template_kwargs"] = {"enable_thinking": False}
    parsed = asked(form, strict=False, **options)
    # Otherwise most answers of harmony are only reasoning.
    begun = BEGINNINGS[form] if form == "harmony" else ""
    found = [walk(parsed.sampling.grammar.source, seed, begun) for seed in range(12)]
    answers = [Answer.of(parsed.form, text) for text in found if text is not None]
    assert len(answers) >= 6
    assert {call.name for answer in answers for call in answer.calls} == names
    counts = {len(answer.calls) for answer in answers}
    assert min(counts) == 1
    assert (max(counts) > 1) == (parallel and form != "harmony")
    for answer in answers:
        assert answer.text == ""
        for call in answer.calls:
            check_call(call)


@pytest.mark.parametrize("form", sorted(BEGINNINGS))
def test_strict_tools_match_schema(form):
    parsed = asked(form, strict=True)
    source, called = parsed.sampling.grammar.source, 0
    for seed in range(8):
        text = walk(source, seed, BEGINNINGS[form])
        if text is not None:
            answer = Answer.of(parsed.form, text)
            called += len(answer.calls)
            assert answer.calls
            for call in answer.calls:
                check_call(call)
    assert called >= 4
    matcher = llguidance.LLMatcher(vocabulary(), source, log_level=0)
    assert matcher.consume_tokens(vocabulary().tokenize_str(PROSE.get(form, "") + "No call."))
    assert matcher.is_accepting()
    assert asked(form, strict=False).sampling.grammar is None


def test_structured_answer_may_think_first():
    parsed = asked("hermes", strict=False, response_format={"type": "json_object"})
    assert parsed.form.thinks == "perhaps"
    tokens = vocabulary()
    for beginning, end, accepts in (
        ("<think>\nFree {text}.\n</think>\n\n", '{"a": 1}', True),
        ("", "{}", True),
        ("", '<tool_call>\n{"name": "sum", "arguments": {"x": 1, "y": true}}\n</tool_call>', True),
        ("", "Hello", False),
        ("<think></think>", "Hello", False),
    ):
        matcher = llguidance.LLMatcher(tokens, parsed.sampling.grammar.source, log_level=0)
        fits = matcher.consume_tokens(tokens.tokenize_str(beginning + end))
        assert (fits and matcher.is_accepting()) == accepts


def test_structured_harmony_answers():
    parsed = asked("harmony", strict=False, response_format={"type": "json_object"})
    thought = "<|channel|>analysis<|message|>Free {text}.<|end|><|start|>assistant"
    tokens = vocabulary()
    for text, accepts in (
        (thought + '<|channel|>final<|message|>{"a": 1}', True),
        (thought * 2 + "<|channel|>final<|message|>{}", True),
        ("<|channel|>final<|message|>{}", True),
        ("<|channel|>final<|message|>No", False),
        ("{}", False),
        (thought + "{}", False),
    ):
        matcher = llguidance.LLMatcher(tokens, parsed.sampling.grammar.source, log_level=0)
        fits = matcher.consume_tokens(tokens.tokenize_str(text))
        assert (fits and matcher.is_accepting()) == accepts
        if accepts:
            assert json.loads(Answer.of(parsed.form, text).text) in ({"a": 1}, {})


def test_command_line_names_every_call_format():
    from dms_jax.command_line.serve import Config

    kind = str(Config.__annotations__["tool_calls"])
    assert all(repr(name) in kind for name in FORMATS)
