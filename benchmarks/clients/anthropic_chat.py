"""Anthropic's SDK: one message whole, one streamed. Arguments: URL, model."""

import sys

import anthropic


def main(url: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    asked = {
        "model": model,
        "messages": [{"role": "user", "content": "Which path reads faster? " * 12}],
        "max_tokens": 24,
        # Its newest API knows no temperature any more; the server does.
        "extra_body": {"temperature": 0.0},
    }
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        streamed = "".join(stream.text_stream)
    assert streamed == "".join(block.text for block in whole.content if block.type == "text")
    assert whole.usage.output_tokens == 24
    print(f"{whole.usage.output_tokens} tokens, whole and streamed alike")


if __name__ == "__main__":
    main(*sys.argv[1:])
