"""The agent loop of openai-agents, over chat completions and over responses, whole and streamed.

Five answers with two tools: two parallel calls, and a call with another one's result.
"""

import asyncio
import sys

import agents
import openai

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
DEGREES = {"Paris": 21, "Rome": 25, "Oslo": 4}
asked = []


@agents.function_tool
def get_degrees(city: str) -> str:
    """The temperature of a city in degrees Celsius."""
    asked.append(city)
    return f"{city} has {DEGREES[city]}"


@agents.function_tool
def to_fahrenheit(degrees: int) -> str:
    """Degrees Celsius in degrees Fahrenheit."""
    asked.append(degrees)
    return f"{degrees} are {round(degrees * 1.8 + 32)}"


async def main() -> None:
    """Asks each agent, which calls tools until it has the answer."""
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        model = kind(model="scripted", openai_client=client)
        tools = [get_degrees, to_fahrenheit]
        agent = agents.Agent("trip", model=model, tools=tools, instructions="Be brief.")
        result = await agents.Runner.run(agent, "Plan my trip.")
        assert result.final_output == "Go to Rome, which has 77.", result.final_output
        assert len(result.raw_responses) == 5
        streamed = agents.Runner.run_streamed(agent, "Plan my trip.")
        async for _event in streamed.stream_events():
            pass
        assert streamed.final_output == result.final_output


asyncio.run(main())
assert [set(map(str, asked[n : n + 5])) for n in range(0, len(asked), 5)] == [
    {"Paris", "21", "Rome", "Oslo", "25"}
] * 4, asked
print("done")
