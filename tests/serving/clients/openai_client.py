"""OpenAI's client for Python: chats, tools, structured answers, responses, streams."""

import json
import sys

import openai
import pydantic

address = sys.argv[1]
client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
QUESTION = [{"role": "user", "content": "What is the weather in Paris?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "The weather.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


class Weather(pydantic.BaseModel):
    """The schema of a structured answer."""

    city: str
    degrees: int


assert [model.id for model in client.models.list()] == ["scripted"]

# A tool loop over chat completions, until there are no calls.
messages = list(QUESTION)
for _turn in range(3):
    answer = client.chat.completions.create(model="scripted", messages=messages, tools=[TOOL])
    choice = answer.choices[0]
    messages.append(choice.message)
    if choice.finish_reason != "tool_calls":
        break
    for call in choice.message.tool_calls:
        assert json.loads(call.function.arguments) == {"city": "Paris"}
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
assert len(messages) == 4
assert choice.message.content == "It is sunny in Paris."

# A stream, assembled by the client.
with client.chat.completions.stream(model="scripted", messages=QUESTION, tools=[TOOL]) as stream:
    kinds = {event.type for event in stream}
    final = stream.get_final_completion().choices[0].message
assert {"content.delta", "tool_calls.function.arguments.done"} <= kinds
assert final.content == "One moment."
assert final.tool_calls[0].function.name == "get_weather"

# Structured answers: the client sends pydantic's schema and returns a validated object.
asked = [{"role": "user", "content": "As JSON."}]
parsed = client.chat.completions.parse(model="scripted", messages=asked, response_format=Weather)
assert parsed.choices[0].message.parsed == Weather(city="Paris", degrees=21)

# Responses, whole and streamed.
function = {"type": "function", **FUNCTION, "strict": True}
response = client.responses.create(
    model="scripted", input=QUESTION, tools=[function], instructions="Be brief."
)
assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
assert response.output_text == "One moment."
result = {
    "type": "function_call_output",
    "call_id": response.output[-1].call_id,
    "output": "sunny",
}
again = client.responses.create(
    model="scripted", input=[*QUESTION, *response.output, result], tools=[function]
)
assert again.output_text == "It is sunny in Paris."
with client.responses.stream(model="scripted", input="As JSON.", text_format=Weather) as stream:
    for _event in stream:
        pass
    assert stream.get_final_response().output_parsed == Weather(city="Paris", degrees=21)
try:
    client.responses.create(model="scripted", input="a", previous_response_id="resp_1")
    refused = None
except openai.BadRequestError as error:
    refused = error.param
assert refused == "previous_response_id"

text = client.completions.create(model="scripted", prompt="Once", logprobs=1, max_tokens=5)
assert text.choices[0].text
print("done")
