// OpenAI's client for JavaScript: a loop of tools, streams, responses.
import assert from "node:assert/strict";
import OpenAI from "openai";

const client = new OpenAI({ baseURL: `${process.argv[2]}/v1`, apiKey: "none" });
const model = "scripted";
const question = { role: "user", content: "What is the weather in Paris?" };
const parameters = {
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
};
const described = { name: "get_weather", description: "The weather.", parameters };
const tools = [{ type: "function", function: described }];

const messages = [question];
for (let turn = 0; turn < 3; turn++) {
  const { choices } = await client.chat.completions.create({ model, messages, tools });
  messages.push(choices[0].message);
  if (choices[0].finish_reason !== "tool_calls") break;
  for (const call of choices[0].message.tool_calls) {
    assert.deepEqual(JSON.parse(call.function.arguments), { city: "Paris" });
    messages.push({ role: "tool", tool_call_id: call.id, content: "sunny" });
  }
}
assert.equal(messages.length, 4);
assert.equal(messages[3].content, "It is sunny in Paris.");

const stream = client.chat.completions.stream({ model, messages: [question], tools });
const final = await stream.finalChatCompletion();
assert.equal(final.choices[0].message.content, "One moment.");
assert.equal(final.choices[0].message.tool_calls[0].function.name, "get_weather");

const functions = [{ type: "function", strict: true, ...described }];
const response = await client.responses.create({ model, input: [question], tools: functions });
assert.deepEqual(response.output.map((item) => item.type), ["reasoning", "message", "function_call"]);
const events = await client.responses.create({
  model,
  input: [question, ...response.output,
    { type: "function_call_output", call_id: response.output.at(-1).call_id, output: "sunny" }],
  tools: functions,
  stream: true,
});
let text = "", last;
for await (const event of events) {
  if (event.type === "response.output_text.delta") text += event.delta;
  last = event;
}
assert.equal(text, "It is sunny in Paris.");
assert.equal(last.type, "response.completed");
console.log("done");
