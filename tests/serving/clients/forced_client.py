"""Clients of OpenAI and Anthropic on a real model whose answers grammars constrain.

The contents are the model's; the test is that the clients can parse them.
"""

import json
import sys
from typing import Literal

import anthropic
import openai
import pydantic

address, name, turns = sys.argv[1:]
client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")


class Place(pydantic.BaseModel):
    """The schema of an answer."""

    where: Literal["north", "south"]
    steps: int = pydantic.Field(ge=0, le=99)


def tool_of(name: str, **properties: object) -> dict:
    """A function whose arguments match their schema."""
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"name": name, "description": "A move.", "parameters": parameters, "strict": True}


GO = tool_of("go", where={"enum": ["north", "south"]})
TAKE = tool_of("take", count={"type": "integer", "minimum": 0, "maximum": 9})
FUNCTIONS = {"go": GO, "take": TAKE}


def check(called: str, arguments: dict) -> None:
    """Fails unless the arguments match a function."""
    properties = FUNCTIONS[called]["parameters"]["properties"]
    assert arguments.keys() == properties.keys(), arguments
    for value in arguments.values():
        assert value in ("north", "south") if called == "go" else 0 <= value <= 9


def play(stream: bool) -> None:
    """Plays several turns, each with a call of one of two tools."""
    messages = [{"role": "user", "content": "Go."}]
    tools = [{"type": "function", "function": each} for each in FUNCTIONS.values()]
    for turn in range(int(turns)):
        wanted = ("go", "take")[turn % 2]
        asked = dict(
            model=name,
            messages=messages,
            tools=tools,
            tool_choice={"type": "function", "function": {"name": wanted}},
            parallel_tool_calls=False,
            max_tokens=60,
            seed=turn,
        )
        if stream:
            with client.chat.completions.stream(**asked) as events:
                for _event in events:
                    pass
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(**asked).choices[0]
        assert choice.finish_reason == "tool_calls", choice
        (call,) = choice.message.tool_calls
        assert call.function.name == wanted
        check(wanted, json.loads(call.function.arguments))
        message = {"role": "assistant", "content": choice.message.content}
        function = {"name": wanted, "arguments": call.function.arguments}
        message["tool_calls"] = [{"id": call.id, "type": "function", "function": function}]
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "ok"}]


play(stream=False)
play(stream=True)

QUESTION = [{"role": "user", "content": "Where?"}]
parsed = client.chat.completions.parse(
    model=name, messages=QUESTION, response_format=Place, max_tokens=60
)
assert isinstance(parsed.choices[0].message.parsed, Place)
with client.responses.stream(
    model=name, input=QUESTION, text_format=Place, max_output_tokens=60
) as stream:
    for _event in stream:
        pass
    assert isinstance(stream.get_final_response().output_parsed, Place)
response = client.responses.create(
    model=name,
    input=QUESTION,
    tools=[{"type": "function", **GO}],
    tool_choice={"type": "function", "name": "go"},
    parallel_tool_calls=False,
    max_output_tokens=60,
)
(called,) = response.output
check(called.name, json.loads(called.arguments))

blocks = [{"name": each["name"], "input_schema": each["parameters"]} for each in FUNCTIONS.values()]
messages = anthropic.Anthropic(base_url=address, api_key="none").messages
asked = dict(model=name, max_tokens=60, messages=QUESTION, tools=blocks)
asked["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
answer = messages.create(**asked)
with messages.stream(**asked) as stream:
    final = stream.get_final_message()
for each in (answer, final):
    assert each.stop_reason == "tool_use", each
    (block,) = each.content
    check(block.name, block.input)
print("done")
