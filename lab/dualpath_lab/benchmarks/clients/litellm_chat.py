"""LiteLLM as agents use it: one answer without and one with streaming. Arguments: URL, model."""

import sys

import litellm


def main(url: str, model: str) -> None:
    request = {
        "model": f"hosted_vllm/{model}",
        "api_base": f"{url}/v1",
        "messages": [{"role": "user", "content": "Which path reads faster? " * 12}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = litellm.completion(**request)
    chunks = list(litellm.completion(**request, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 24
    print(f"{whole.usage.prompt_tokens} prompt tokens, {len(chunks)} chunks")


if __name__ == "__main__":
    main(*sys.argv[1:])
