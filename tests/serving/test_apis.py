"""Each API in and out, with scripted answers: formats, events, tools and results."""

import json
import logging

import pytest

import dms_jax
from dms_jax.serving import chat_api, completions_api, messages_api, responses_api
from dms_jax.serving.apis import APIS, parse_body
from dms_jax.serving.fields import IGNORED
from dms_jax.serving.refusals import RefusalError
from tests.serving.scripted import CACHED, scripted, served_model
from tests.serving.support import BODIES

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
TOOL = {"type": "function", "function": WEATHER}
QUESTION = "What is the weather in Paris?"
USER = {"role": "user", "content": QUESTION}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TABLES = {
    "/v1/completions": completions_api._FIELDS,
    CHAT: chat_api._FIELDS,
    RESPONSES: responses_api._FIELDS,
    MESSAGES: messages_api._FIELDS,
}
ARGUMENTS = '{"city": "Paris"}'
SUNNY = "It is sunny in Paris."
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


def weather(text):
    """Calls the tool, then repeats its result."""
    if "<tool_response>\nsunny" in text:
        return SUNNY
    if "# Tools" not in text:
        return "<think>\nEasy.\n</think>\n\nFour." if "<think>" not in text else "Four."
    call = f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}'
    return f"<think>\nI look.\n</think>\n\nOne moment.\n<tool_call>\n{call}\n</tool_call>"


@pytest.fixture(scope="module")
def client():
    with scripted("hermes", weather) as made:
        yield made


# -- chat completions ----------------------------------------------------------------------------


def test_chat_tool_call_and_result(client):
    answer = client.ask(chat=True, messages=[USER], tools=[TOOL])
    (choice,) = answer["choices"]
    message = choice["message"]
    assert (message["content"], message["reasoning_content"]) == ("One moment.", "I look.")
    (call,) = message["tool_calls"]
    assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
    assert choice["finish_reason"] == "tool_calls"
    prompt = client.service.prompts[-1]
    assert json.dumps(TOOL) in prompt  # as templates want it
    assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0

    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    choice = client.ask(chat=True, messages=[USER, message, result], tools=[TOOL])["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (SUNNY, "stop")
    assert "tool_calls" not in choice["message"]
    assert client.service.prompts[-1] == prompt.removesuffix("<|im_start|>assistant\n") + (
        "<|im_start|>assistant\n<think>\nI look.\n</think>\n\nOne moment.\n<tool_call>\n"
        f'{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_streamed_chat_equals_whole(client):
    options = {"include_usage": True}
    *chunks, last = client.stream(chat=True, messages=[USER], tools=[TOOL], stream_options=options)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(each.get("reasoning_content", "") for each in deltas) == "I look."
    assert "".join(each.get("content", "") for each in deltas) == "One moment."
    calls = [call for each in deltas for call in each.get("tool_calls", ())]
    assert all(call["index"] == 0 for call in calls)
    assert ["id" in call for call in calls] == [True, *[False] * (len(calls) - 1)]
    assert calls[0]["function"]["name"] == "get_weather"
    assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-1:]] == ["tool_calls"]
    assert last["usage"]["total_tokens"] > 0
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": CACHED}


def test_missing_tool_description_is_empty(client):
    """Some templates join descriptions to texts."""
    bare = {"type": "function", "function": {"name": "get_weather"}}
    client.ask(chat=True, messages=[USER], tools=[bare])
    assert '"description": "", "parameters": {"type": "object"' in client.service.prompts[-1]


def test_tool_choice_none_hides_tools(client):
    for fields in ({}, dict(tools=[TOOL], tool_choice="none"), dict(tools=[])):
        choice = client.ask(chat=True, messages=[USER], **fields)["choices"][0]
        assert choice["message"]["content"] == "Four."
        assert "get_weather" not in client.service.prompts[-1]


def test_each_choice_has_its_own_calls(client):
    choices = client.ask(chat=True, messages=[USER], tools=[TOOL], n=3)["choices"]
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
    assert len(ids) == 3
    chunks = client.stream(chat=True, messages=[USER], tools=[TOOL], n=2)
    for number in range(2):
        calls = [
            call
            for chunk in chunks
            for choice in chunk["choices"]
            if choice["index"] == number
            for call in choice["delta"].get("tool_calls", ())
        ]
        assert "".join(call["function"]["arguments"] for call in calls) == ARGUMENTS


def test_reasoning_effort_reaches_template(client):
    for fields in (PLAIN, {"reasoning_effort": "none"}):
        client.ask(chat=True, messages=[USER], **fields)
        assert client.service.prompts[-1].endswith("<think>\n\n</think>\n\n")
    client.ask(chat=True, messages=[USER], reasoning_effort="high")
    assert client.service.prompts[-1].endswith("<|im_start|>assistant\n")


def test_leading_system_messages_are_joined(client):
    said = [{"role": role, "content": role.title()} for role in ("system", "developer")]
    client.ask(chat=True, messages=[*said, USER])
    assert client.service.prompts[-1].startswith(
        "<|im_start|>system\nSystem\n\nDeveloper<|im_end|>\n<|im_start|>user\n"
    )


def test_unknown_fields_warn_once(client, caplog):
    with caplog.at_level(logging.WARNING, logger="dms_jax"):
        for _ in range(2):
            client.ask(chat=True, messages=[USER], colour=1, shade={"a": 1}, user="me", store=True)
    said = [record.getMessage() for record in caplog.records]
    assert sorted(said) == [
        f"Ignored the unknown request field {name}." for name in ("colour", "shade")
    ]


def test_call_ids_are_shortened_for_mistral():
    calls = [{"id": "call_123", "function": {"name": "get_weather", "arguments": ARGUMENTS}}]
    messages = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_123", "content": "sunny"},
    ]
    with scripted("mistral", lambda text: SUNNY) as client:
        client.ask(chat=True, messages=messages, tools=[TOOL])
        (prompt,) = client.service.prompts
    call = json.loads(prompt.partition("[TOOL_CALLS]")[2].partition("</s>")[0])[0]
    result = json.loads(prompt.partition("[TOOL_RESULTS]")[2].partition("[/TOOL_RESULTS]")[0])
    assert call["id"] == result["call_id"]
    assert len(call["id"]) == 9


def in_channels(text):
    if "sunny" in text:
        return f"<|channel|>final<|message|>{SUNNY}"
    if "# Tools" not in text:
        thought = "<|channel|>analysis<|message|>Easy.<|end|>"
        return f"{thought}<|start|>assistant<|channel|>final<|message|>Four."
    return (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary "
        f"to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}"
    )


def test_harmony_answer():
    """Reasoning is marked without tools too; each result follows its call."""
    with scripted("harmony", in_channels) as client:
        answer = client.ask(chat=True, messages=[USER], reasoning_effort="low")
        message = answer["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == ("Four.", "Easy.")
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
        assert "Reasoning: low" in client.service.prompts[-1]
        choice = client.ask(chat=True, messages=[USER], tools=[TOOL])["choices"][0]
        (call,) = choice["message"]["tool_calls"]
        assert call["function"] == {"name": "get_weather", "arguments": ARGUMENTS}
        assert choice["finish_reason"] == "tool_calls"
        more = {"id": "2", "type": "function", "function": {"name": "other", "arguments": "{}"}}
        said = {**choice["message"], "content": "One moment.", "tool_calls": [call, more]}
        results = [
            {"role": "tool", "tool_call_id": "2", "content": "rain"},
            {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
        ]
        choice = client.ask(chat=True, messages=[USER, said, *results], tools=[TOOL])["choices"][0]
        assert choice["message"]["content"] == SUNNY
        assert client.service.prompts[-1].endswith(
            "<|start|>assistant<|channel|>analysis<|message|>I look.\nOne moment.<|end|>"
            "<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>"
            f"{ARGUMENTS}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary"
            '<|message|>"sunny"<|end|><|start|>assistant to=functions.other<|channel|>commentary '
            "json<|message|>{}<|call|><|start|>functions.other to=assistant<|channel|>commentary"
            '<|message|>"rain"<|end|><|start|>assistant'
        )


# -- responses -----------------------------------------------------------------------------------

CALLING = {**WEATHER, "type": "function", "strict": False}


def test_response_items_round_trip(client):
    asked = dict(model="scripted", instructions="Be brief.", tools=[CALLING])
    first = client.post(RESPONSES, input=QUESTION, **asked)
    assert (first["object"], first["status"]) == ("response", "completed")
    thought, said, call = first["output"]
    assert [each["type"] for each in (thought, said, call)] == [
        "reasoning",
        "message",
        "function_call",
    ]
    assert thought["content"] == [{"type": "reasoning_text", "text": "I look."}]
    assert said["content"][0]["text"] == "One moment."
    assert (call["name"], call["arguments"]) == ("get_weather", ARGUMENTS)
    usage = first["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["output_tokens_details"]["reasoning_tokens"] > 0
    prompt = client.service.prompts[-1]
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")

    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny"}
    items = [{"type": "message", **USER}, *first["output"], result]
    second = client.post(RESPONSES, input=items, **asked)
    assert second["output"][0]["content"][0]["text"] == SUNNY
    # All items of one answer are one message.
    again = client.service.prompts[-1]
    assert again.startswith(prompt + "<think>\nI look.\n</think>\n\nOne moment.\n<tool_call>")
    assert again.count("<|im_start|>assistant") == 2


def test_response_events(client):
    events = client.named_events(RESPONSES, input=QUESTION, tools=[CALLING])
    assert [each["sequence_number"] for each in events] == list(range(len(events)))
    kinds = [each["type"].removeprefix("response.") for each in events]
    once = [kind for n, kind in enumerate(kinds) if kinds[n - 1 : n] != [kind]]  # deltas together
    item = ["output_item.added", "content_part.added"]
    assert once == [
        *("created", "in_progress"),
        *item,
        *("reasoning_text.delta", "reasoning_text.done", "content_part.done", "output_item.done"),
        *item,
        *("output_text.delta", "output_text.done", "content_part.done", "output_item.done"),
        "output_item.added",
        *("function_call_arguments.delta", "function_call_arguments.done", "output_item.done"),
        "completed",
    ]
    by_kind = {}
    for each in events:
        by_kind.setdefault(each["type"].removeprefix("response."), []).append(each)
    assert "".join(each["delta"] for each in by_kind["output_text.delta"]) == "One moment."
    assert "".join(each["delta"] for each in by_kind["reasoning_text.delta"]) == "I look."
    assert all(each["content_index"] == 0 for each in by_kind["reasoning_text.delta"])
    assert "".join(each["delta"] for each in by_kind["function_call_arguments.delta"]) == ARGUMENTS
    added = [each["item"] for each in by_kind["output_item.added"]]
    done = [each["item"] for each in by_kind["output_item.done"]]
    assert [each["id"] for each in added] == [each["id"] for each in done]
    assert [each["output_index"] for each in by_kind["output_item.done"]] == [0, 1, 2]
    (last,) = by_kind["completed"]
    assert last["response"]["output"] == done
    assert last["response"]["id"] == by_kind["created"][0]["response"]["id"]
    assert last["response"]["usage"]["input_tokens_details"] == {"cached_tokens": CACHED}


def test_truncated_response_is_incomplete(client):
    cut = client.post(RESPONSES, input=QUESTION, max_output_tokens=5)
    assert cut["status"] == "incomplete"
    assert cut["incomplete_details"] == {"reason": "max_output_tokens"}
    events = client.named_events(RESPONSES, input=QUESTION, max_output_tokens=5)
    assert events[-1]["type"] == "response.incomplete"


def test_namespaced_functions():
    def script(text):
        assert '"name": "files.read"' in text
        if "<tool_response>" in text:
            assert '{"name": "files.read", "arguments": {"path": "a"}}' in text
            return "Done."
        return '<tool_call>\n{"name": "files.read", "arguments": {"path": "a"}}\n</tool_call>'

    tools = [
        {"type": "namespace", "name": "files", "tools": [{"type": "function", "name": "read"}]}
    ]
    with scripted("hermes", script) as client:
        (call,) = client.post(RESPONSES, input="Read a.", tools=tools)["output"]
        assert (call["namespace"], call["name"]) == ("files", "read")
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "x"}
        items = [{"role": "user", "content": "Read a."}, call, result]
        second = client.post(RESPONSES, input=items, tools=tools)
        assert second["output"][0]["content"][0]["text"] == "Done."
        error = client.post(RESPONSES, 400, input="a", tools=[{**tools[0], "name": 3}])["error"]
        assert "have names" in error["message"]


def test_codex_request(client):
    """The fields that Codex sends; tools that are not functions are ignored."""
    request = {
        "model": "scripted",
        "instructions": "You are a coding agent.",
        "input": [
            {
                "type": "message",
                "role": "developer",
                "content": [{"type": "input_text", "text": "<permissions>"}],
            },
            {
                "type": "message",
                "role": "user",
                "content": [{"type": "input_text", "text": QUESTION}],
            },
        ],
        "tools": [
            CALLING,
            {"type": "local_shell"},
            {"type": "web_search", "external_web_access": False},
            {"type": "custom", "name": "apply_patch", "format": {"type": "grammar"}},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "service_tier": "auto",
        "prompt_cache_key": "0199",
        "text": {"verbosity": "low"},
        "client_metadata": {"session": "1"},
    }
    events = client.named_events(RESPONSES, **request)
    assert events[-1]["type"] == "response.completed"
    assert events[-1]["response"]["output"][-1]["name"] == "get_weather"
    prompt = client.service.prompts[-1]
    assert "apply_patch" not in prompt
    assert prompt.startswith(
        "<|im_start|>system\nYou are a coding agent.\n\n<permissions>\n\n# Tools"
    )


# -- messages ------------------------------------------------------------------------------------

BLOCKS = [
    {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER["parameters"]}
]


def test_message_blocks_round_trip(client):
    asked = dict(max_tokens=500, system=[{"type": "text", "text": "Be brief."}], tools=BLOCKS)
    first = client.post(MESSAGES, messages=[USER], **asked)
    assert (first["type"], first["role"], first["stop_reason"]) == (
        "message",
        "assistant",
        "tool_use",
    )
    thinking, text, call = first["content"]
    assert (thinking["thinking"], text["text"]) == ("I look.", "One moment.")
    assert (call["type"], call["name"], call["input"]) == (
        "tool_use",
        "get_weather",
        {"city": "Paris"},
    )
    cached = {"cache_control": {"type": "ephemeral"}}
    result = {
        "type": "tool_result",
        "tool_use_id": call["id"],
        "content": [{"type": "text", "text": "sunny", **cached}],
    }
    answered = [USER, {"role": "assistant", "content": first["content"]}]
    follow = {"type": "text", "text": "And then?", **cached}
    second = client.post(
        MESSAGES, messages=[*answered, {"role": "user", "content": [result, follow]}], **asked
    )
    assert second["content"] == [{"type": "text", "text": SUNNY}]
    assert second["stop_reason"] == "end_turn"
    prompt = client.service.prompts[-1]
    assert prompt.startswith("<|im_start|>system\nBe brief.\n\n# Tools")
    assert prompt.endswith(
        "<tool_response>\nsunny\n</tool_response><|im_end|>\n"
        "<|im_start|>user\nAnd then?<|im_end|>\n<|im_start|>assistant\n"
    )


def test_message_events(client):
    events = client.named_events(MESSAGES, messages=[USER], max_tokens=500, tools=BLOCKS)
    kinds = [each["type"] for each in events]
    once = [kind for n, kind in enumerate(kinds) if kinds[n - 1 : n] != [kind]]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    assert once == ["message_start", *block * 3, "message_delta", "message_stop"]
    starts = [each["content_block"] for each in events if each["type"] == block[0]]
    assert [each["type"] for each in starts] == ["thinking", "text", "tool_use"]
    deltas = [each["delta"] for each in events if each["type"] == block[1]]
    assert "".join(each.get("thinking", "") for each in deltas) == "I look."
    assert "".join(each.get("text", "") for each in deltas) == "One moment."
    assert "".join(each.get("partial_json", "") for each in deltas) == ARGUMENTS
    ended = next(each for each in events if each["type"] == "message_delta")
    assert ended["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert ended["usage"]["output_tokens"] > 0
    assert ended["usage"]["cache_read_input_tokens"] == CACHED
    read = ended["usage"]["input_tokens"]  # Anthropic counts those that were not cached
    assert events[0]["message"]["usage"]["input_tokens"] == read + CACHED


def test_message_stop_reasons():
    with scripted("plain", lambda text: "one two three STOP four") as client:
        asked = dict(messages=[USER])
        whole = client.post(MESSAGES, max_tokens=99, **asked)
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
        cut = client.post(MESSAGES, max_tokens=3, **asked)
        assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)
        found = client.post(MESSAGES, max_tokens=99, stop_sequences=["five", "STOP"], **asked)
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "STOP")
        assert found["content"][0]["text"] == "one two three "


def test_message_max_tokens_is_reduced_to_fit(client):
    """Claude Code asks for 32,000 tokens of every answer."""
    client.post(MESSAGES, messages=[USER], max_tokens=32_000)
    sampling, prompt = client.service.samplings[-1], client.service.prompts[-1]
    read = len(client.post("/tokenize", prompt=prompt)["tokens"])
    assert sampling.max_new_tokens == 4096 - read


def test_claude_code_request(client):
    """The fields that Claude Code sends; cache fields and server tools are ignored."""
    request = {
        "model": "scripted",
        "max_tokens": 500,
        "system": [
            {"type": "text", "text": "You are a CLI.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": " Be brief."},
        ],
        "messages": [{"role": "user", "content": [{"type": "text", "text": QUESTION}]}],
        "tools": [*BLOCKS, {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}],
        "metadata": {"user_id": "user_1"},
        "thinking": {"type": "enabled", "budget_tokens": 1024},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "temperature": 1,
        "stream": True,
    }
    events = client.named_events(f"{MESSAGES}?beta=true", **request)
    assert events[-1]["type"] == "message_stop"
    assert client.service.prompts[-1].startswith("<|im_start|>system\nYou are a CLI. Be brief.")
    counted = client.post(
        f"{MESSAGES}/count_tokens",
        **{name: request[name] for name in ("model", "system", "messages", "tools")},
    )
    assert counted["input_tokens"] == events[0]["message"]["usage"]["input_tokens"]


# -- tokens --------------------------------------------------------------------------------------


def test_tokenize_and_detokenize(client):
    found = client.post("/tokenize", prompt="Hello there")
    assert found["count"] == len(found["tokens"])
    assert found["max_model_len"] == 4096
    assert client.post("/detokenize", tokens=found["tokens"]) == {"prompt": "Hello there"}
    texts = client.post("/tokenize", prompt="Hello there", return_token_strs=True)["token_strs"]
    assert "".join(texts) == "Hello there"
    chat = client.post("/tokenize", messages=[USER], tools=[TOOL])
    client.ask(chat=True, messages=[USER], tools=[TOOL])
    text = client.post("/detokenize", tokens=chat["tokens"])["prompt"]
    assert text == client.service.prompts[-1]
    without = client.post("/tokenize", messages=[USER], add_generation_prompt=False)
    assert client.post("/detokenize", tokens=without["tokens"])["prompt"].endswith("<|im_end|>\n")


# -- structured answers --------------------------------------------------------------------------

PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


FORMAT = {"type": "json_schema", "name": "p", "schema": PERSON}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, dict(response_format={"type": "json_object"})),
        (CHAT, dict(response_format={"type": "json_schema", "json_schema": {"schema": PERSON}})),
        (CHAT, dict(guided_json=PERSON)),
        (CHAT, dict(guided_json=json.dumps(PERSON))),
        (CHAT, dict(structured_outputs={"json": PERSON})),
        ("/v1/completions", dict(response_format={"type": "json_object"})),
        (RESPONSES, dict(text={"format": FORMAT})),
        (MESSAGES, dict(output_config={"format": FORMAT})),
    ],
)
def test_json_schema_in_every_api(client, path, fields):
    client.post(path, **BODIES[path], **fields)
    grammar = client.service.samplings[-1].grammar
    assert isinstance(grammar, dms_jax.generation.grammar.Grammar)
    assert '"type": "object"' in grammar.source
    client.post(path, **BODIES[path])
    assert client.service.samplings[-1].grammar is None


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "[a-z]+"},
        {"guided_choice": ["yes", "no"]},
        {"structured_outputs": {"regex": "[a-z]+"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
    ],
)
def test_guided_regex_and_choice(client, fields):
    client.post("/v1/completions", prompt="a", **fields)
    grammar = client.service.samplings[-1].grammar
    assert ("yes" in grammar.source) == ("choice" in str(fields))


# -- refusals ------------------------------------------------------------------------------------

BAD = {"type": "object", "properties": {"a": {"type": "objekt"}}}
NAMED = {"type": "function", "function": {"name": "g"}}


def tool(**fields):
    return {"type": "function", "function": {**WEATHER, **fields}}


def json_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


# Further fields of a request, the field named in the error, and words of the message.
REFUSED_CHAT = [
    (dict(tools=[TOOL, TOOL]), "tools", "'get_weather' is the name of 2"),
    (dict(tools=[{"type": "custom"}]), "tools", 'must be {"type": "func'),
    (dict(tools={}), "tools", "must be a list"),
    (dict(tools=[tool(name=None)]), "tools", "name"),
    (dict(tools=[tool(parameters=1)]), "tools", "JSON schema"),
    (dict(tools=[TOOL], tool_choice="some"), "tool_choice", "got 'some'"),
    (dict(tool_choice="required"), "tools", "needs tools"),
    (dict(tools=[TOOL], tool_choice=NAMED), "tool_choice", "'g', which is not one of the tools"),
    (dict(tools=[TOOL], parallel_tool_calls=1), "parallel_tool_calls", "True"),
    (dict(response_format=json_format(BAD)), "response_format", "objekt"),
    (dict(response_format=json_format(3)), "response_format", "is an object"),
    (dict(response_format="json"), "response_format", '"json_object"'),
    (dict(guided_regex="a(b"), "guided_regex", "unclosed group"),
    (dict(guided_choice=[""]), "guided_choice", "none of them empty"),
    (dict(guided_json="{"), "guided_json", "must be an object"),
    (dict(structured_outputs={"xml": 1}), "structured_outputs", "one of json"),
    (
        dict(guided_regex="a", response_format={"type": "json_object"}),
        "guided_regex",
        "Send one",
    ),
    (
        dict(tools=[tool(parameters=BAD, strict=True)]),
        "tools",
        "tools[0] (get_weather): The grammar cannot be compiled",
    ),
    (  # an answer may call the tool instead of its JSON
        dict(tools=[tool(parameters={"properties": []})], response_format={"type": "json_object"}),
        "tools",
        "tools[0] (get_weather): The grammar cannot be compiled",
    ),
    (
        dict(messages=[{"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]),
        "messages",
        "which are texts",
    ),
    (dict(max_output_tokens=9), "max_output_tokens", "send max_tokens"),
    (dict(stop_sequences=["a"]), "stop_sequences", "send stop"),
    (dict(reasoning={"effort": "low"}), "reasoning", "send reasoning_effort"),
    (dict(enable_thinking=False), "enable_thinking", "send reasoning_effort"),
    (dict(input="a"), "input", "send messages"),
    (dict(system="a"), "system", "a message with the role system"),
    (dict(do_sample=False), "do_sample", "send temperature"),
    (dict(max_length=9), "max_length", "send max_tokens"),
    (dict(num_beams=4), "num_beams", "not supported. Leave it out"),
    (dict(min_length=4), "min_length", "not supported"),
    (dict(sampling_seed=4), "sampling_seed", "send seed"),
]
REFUSED_RESPONSES = [
    (dict(previous_response_id="r"), "previous_response_id", "no answers"),
    (dict(background=True), "background", "stored"),
    (dict(input=[]), "input", "not empty"),
    (dict(input=[{"type": "item_reference", "id": "1"}]), "input", "'item_reference'"),
    (dict(input=[{"role": "tool", "content": "a"}]), "input", "role must be"),
    (dict(input=[{"role": "user", "content": [{"type": "input_image"}]}]), "input", "text"),
    (dict(tools=[CALLING, CALLING]), "tools", "2 tools"),
    (dict(tools=[{}]), "tools", "must have a type"),
    (dict(tool_choice={"type": "mcp"}), "tool_choice", "function"),
    (dict(text={"format": {"type": "json_schema"}}), "text.format", "object"),
    (dict(messages=[USER]), "messages", "send input"),
    (dict(max_tokens=9), "max_tokens", "send max_output_tokens"),
    (dict(response_format={"type": "json_object"}), "response_format", "send text"),
]
REFUSED = [
    *((CHAT, dict(messages=[USER]) | fields, *said) for fields, *said in REFUSED_CHAT),
    *((RESPONSES, dict(input=QUESTION) | fields, *said) for fields, *said in REFUSED_RESPONSES),
    ("/tokenize", dict(), "prompt", "either prompt"),
    ("/tokenize", dict(prompt="a", messages=[USER]), "prompt", "either prompt"),
    ("/detokenize", dict(), "tokens", "missing"),
    ("/detokenize", dict(tokens=[10**6]), "tokens", "1000000"),
]


@pytest.mark.parametrize(("path", "fields", "param", "words"), REFUSED)
def test_unsupported_fields_are_refused(client, path, fields, param, words):
    error = client.post(path, 400, **fields)["error"]
    assert error["param"] == param
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (dict(messages=[USER]), "max_tokens is missing"),
        (dict(messages=[USER], max_tokens=9, model="claude"), "no model 'claude'"),
        (
            dict(messages=[{"role": "user", "content": [{"type": "image"}]}], max_tokens=9),
            "'image'",
        ),
        (dict(messages=[{"role": "tool", "content": "a"}], max_tokens=9), "the role user"),
        (dict(messages=[USER], max_tokens=9, tool_choice={"type": "tool"}), "with a name"),
        (dict(messages=[USER], max_tokens=9, tool_choice={"type": []}), "must have the type"),
        (dict(messages=[USER], max_tokens=9, tools=[{"input_schema": {}}]), "name"),
        (dict(messages=[USER], max_tokens=9, tools=BLOCKS * 2), "2 tools"),
        (dict(messages=[USER], max_tokens=9, stop=["a"]), "send stop_sequences"),
        (dict(messages=[USER], max_completion_tokens=9), "send max_tokens"),
        (dict(messages=[USER], max_tokens=9, reasoning_effort="low"), "send thinking"),
        (
            dict(messages=[USER], max_tokens=9, response_format={"type": "json_object"}),
            "send output_config",
        ),
    ],
)
def test_messages_errors_have_anthropic_form(client, fields, words):
    status = 404 if "model" in fields else 400
    answer = client.post(MESSAGES, status, **fields)
    assert answer["type"] == "error"
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert answer["error"]["type"] == kind
    assert words in answer["error"]["message"]


@pytest.mark.parametrize("path", BODIES)
def test_fields_of_other_endpoints_are_refused(path):
    own, served = TABLES[path].served, served_model("plain")
    others = {name for table in TABLES.values() for name in table.served} - {*own} - IGNORED
    assert len(others) > 10
    for name in others:
        with pytest.raises(RefusalError) as refused:
            parse_body(json.dumps(BODIES[path] | {name: [9]}).encode(), path, served, seed=0)
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")


@pytest.mark.parametrize("path", BODIES)
def test_ignored_and_neutral_fields_are_accepted(path):
    """Fields that clients send, also if they resemble a supported one: `speed` and `seed`."""
    ignored = dict.fromkeys(IGNORED - {*TABLES[path].served}, "x")
    neutral = dict(logprobs=False, n=1, num_beams=1, repetition_penalty=1.0, tools=[], stop=[])
    neutral |= dict(truncation="disabled", parallel_tool_calls=True, reasoning=None)
    neutral = {name: neutral[name] for name in neutral.keys() - TABLES[path].served.keys()}
    body = json.dumps(BODIES[path] | ignored | neutral | {"colour": 1}).encode()
    assert parse_body(body, path, served_model("plain"), seed=0).asked.unknown == ("colour",)


@pytest.mark.parametrize("call_format", ["hermes", None])
def test_template_without_tools_is_named(call_format):
    with scripted("plain", lambda text: "Hi", call_format=call_format) as client:
        error = client.ask(chat=True, messages=[USER], tools=[TOOL], status=400)["error"]
        assert error["param"] == "tools"
        assert "no place for tools: it leaves out 'get_weather'" in error["message"]
        calls = [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]
        talk = [USER, {"role": "assistant", "content": "", "tool_calls": calls}]
        error = client.ask(chat=True, messages=talk, status=400)["error"]
        assert "leaves out the tool calls" in error["message"]


def test_template_without_tool_results_is_named():
    template = "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}"
    with scripted(template, lambda text: "Hi") as client:
        talk = [USER, {"role": "tool", "tool_call_id": "1", "content": "It is 21 degrees."}]
        error = client.ask(chat=True, messages=talk, status=400)["error"]
        assert "leaves out results of tools (messages[1])" in error["message"]


def test_tools_need_known_call_format():
    template = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}"
    with scripted(template, lambda text: "Hi") as client:
        error = client.ask(chat=True, messages=[USER], tools=[TOOL], status=400)["error"]
        assert "--tool-calls (hermes, " in error["message"]


@pytest.mark.parametrize("path", BODIES)
def test_priority_in_every_api(client, path):
    for priority in (None, 7, -7):
        client.post(path, **BODIES[path], priority=priority)
    assert client.service.priorities[-3:] == [0, 7, -7]
    error = client.post(path, 400, **BODIES[path], priority=1.5)["error"]
    assert "priority must be a whole number" in error["message"]


def test_stream_errors_in_every_api():
    served, error = served_model("hermes"), RefusalError("full", status=503, code="server_draining")
    for path, body, said in (
        (CHAT, dict(messages=[USER]), '"code":"server_draining"'),
        (RESPONSES, dict(input="a"), 'event: response.failed\ndata: {"type":"response.failed"'),
        (MESSAGES, dict(messages=[USER], max_tokens=3), "overloaded_error"),
    ):
        parsed = parse_body(json.dumps(body).encode(), path, served, seed=0)
        formatter = APIS[path].formatter(parsed, served)
        assert said in "".join(formatter.failure(error))
