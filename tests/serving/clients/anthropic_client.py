"""Anthropic's client for Python: a loop of tools, streams, counts of tokens."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="none")
QUESTION = {"role": "user", "content": "What is the weather in Paris?"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"name": "get_weather", "description": "The weather.", "input_schema": SCHEMA}]
asked = dict(model="scripted", max_tokens=500, tools=TOOLS, system="Be brief.")

messages = [QUESTION]
for _turn in range(3):
    answer = client.messages.create(messages=messages, **asked)
    messages.append({"role": "assistant", "content": answer.content})
    if answer.stop_reason != "tool_use":
        break
    calls = [block for block in answer.content if block.type == "tool_use"]
    assert [call.input for call in calls] == [{"city": "Paris"}]
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"} for call in calls
    ]
    messages.append({"role": "user", "content": results})
assert len(messages) == 4
assert answer.content[0].text == "It is sunny in Paris."

with client.messages.stream(messages=[QUESTION], **asked) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == "One moment."
assert [block.type for block in final.content] == ["thinking", "text", "tool_use"]
assert final.content[2].input == {"city": "Paris"}
assert final.stop_reason == "tool_use"

counted = client.messages.count_tokens(
    model="scripted", messages=[QUESTION], tools=TOOLS, system="Be brief."
)
assert counted.input_tokens == final.usage.input_tokens + final.usage.cache_read_input_tokens
try:
    client.messages.create(model="other", max_tokens=5, messages=[QUESTION])
except anthropic.NotFoundError:
    print("done")
