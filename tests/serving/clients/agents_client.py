"""The agent loop of openai-agents, over chat completions and over responses, whole and streamed."""

import asyncio
import sys

import agents
import openai

agents.set_tracing_disabled(True)
client = openai.AsyncOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none")
asked = []


@agents.function_tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "sunny"


async def main() -> None:
    """Asks each agent, which calls the tool and says what it said."""
    for kind in (agents.OpenAIChatCompletionsModel, agents.OpenAIResponsesModel):
        model = kind(model="scripted", openai_client=client)
        agent = agents.Agent("weather", model=model, tools=[get_weather], instructions="Be brief.")
        question = "What is the weather in Paris?"
        result = await agents.Runner.run(agent, question)
        assert result.final_output == "It is sunny in Paris."
        streamed = agents.Runner.run_streamed(agent, question)
        async for _event in streamed.stream_events():
            pass
        assert streamed.final_output == "It is sunny in Paris."


asyncio.run(main())
assert asked == ["Paris"] * 4
print("done")
