"""An agent of the OpenAI Agents SDK with a tool and without a token limit. Arguments: URL, model.

It runs once without and once with streaming, until the model ends or its context is full.
"""

import asyncio
import sys

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI


@function_tool
def read(file: str) -> str:
    """Return the text of a file."""
    return f"{file}: both engines read."


async def ask(url: str, model: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    agent = Agent(
        name="reader",
        instructions="You know which engine reads. " * 12,
        tools=[read],
        model=OpenAIChatCompletionsModel(model=model, openai_client=client),
        # With greedy sampling a random model rarely ends; at temperature 1 it does.
        model_settings=ModelSettings(temperature=1.0, include_usage=True),
    )
    whole = await Runner.run(agent, "Which path reads faster?", max_turns=2)
    streamed = Runner.run_streamed(agent, "Which path reads faster?", max_turns=2)
    events = [event async for event in streamed.stream_events()]
    tokens = [run.context_wrapper.usage.output_tokens for run in (whole, streamed)]
    assert all(tokens), tokens
    print(f"{tokens[0]} and {tokens[1]} tokens, {len(events)} events")


if __name__ == "__main__":
    asyncio.run(ask(*sys.argv[1:]))
