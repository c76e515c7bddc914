"""The official OpenAI SDK: chat, stream, tool call, Responses API. Arguments: URL, model."""

import sys

from openai import OpenAI

TOOL = {
    "name": "read",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"file": {"enum": ["paths.py", "links.py"]}},
        "required": ["file"],
        "additionalProperties": False,
    },
}


def main(url: str, model: str) -> None:
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    assert [each.id for each in client.models.list().data] == [model]
    messages = [{"role": "user", "content": "Which of the two files did the agent read? " * 8}]
    whole = client.chat.completions.create(
        model=model, messages=messages, max_tokens=24, temperature=0
    )
    stream = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=24,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    called = client.chat.completions.create(
        model=model,
        messages=messages,
        max_tokens=100,
        temperature=0,
        tools=[{"type": "function", "function": TOOL}],
        tool_choice="required",
    )
    (call,) = called.choices[0].message.tool_calls
    response = client.responses.create(model=model, input="Go on.", max_output_tokens=8)
    assert response.usage.output_tokens == 8
    print(f"called {call.function.name}({call.function.arguments})")


if __name__ == "__main__":
    main(*sys.argv[1:])
