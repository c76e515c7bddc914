"""Anthropic's SDK: one message without and one with streaming. Arguments: URL, model."""

import sys

import anthropic


def main(url: str, model: str) -> None:
    client = anthropic.Anthropic(base_url=url, api_key="none")
    request = {
        "model": model,
        "messages": [{"role": "user", "content": "Which path reads faster? " * 12}],
        "max_tokens": 24,
        # The newest SDK has no temperature; the server supports it.
        "extra_body": {"temperature": 0.0},
    }
    whole = client.messages.create(**request)
    with client.messages.stream(**request) as stream:
        streamed = "".join(stream.text_stream)
    assert streamed == "".join(block.text for block in whole.content if block.type == "text")
    assert whole.usage.output_tokens == 24
    print(f"{whole.usage.output_tokens} tokens, complete and streamed")


if __name__ == "__main__":
    main(*sys.argv[1:])
