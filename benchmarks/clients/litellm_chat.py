"""LiteLLM as agents use it: one answer whole, one streamed. Arguments: URL, model."""

import sys

import litellm


def main(url: str, model: str) -> None:
    asked = {
        "model": f"hosted_vllm/{model}",
        "api_base": f"{url}/v1",
        "messages": [{"role": "user", "content": "Which path reads faster? " * 12}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = litellm.completion(**asked)
    chunks = list(litellm.completion(**asked, stream=True))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert streamed == whole.choices[0].message.content
    assert whole.usage.completion_tokens == 24
    print(f"{whole.usage.prompt_tokens} prompt tokens, {len(chunks)} chunks")


if __name__ == "__main__":
    main(*sys.argv[1:])
