"""Sends one long prompt twice: the second time its KV is loaded instead of computed: [ENDPOINT].

`cached_tokens` is the number of prompt tokens whose KV was loaded. Change `TEXT` to send a prompt
that is not stored yet.
"""

import sys
import time

from openai import OpenAI

TEXT = "".join(f"Day {day}: the ship sailed on, and the sea was calm.\n" for day in range(1, 201))
#: Blocks are stored in the background, soon after an answer.
STORED_S = 2.0


def main(endpoint: str = "http://127.0.0.1:8000") -> None:
    client = OpenAI(base_url=f"{endpoint}/v1", api_key="none")
    model = client.models.list().data[0].id
    for attempt in ("first", "second"):
        began_s = time.monotonic()
        answer = client.completions.create(model=model, prompt=TEXT, max_tokens=16, temperature=0)
        took_s = time.monotonic() - began_s
        usage = answer.model_dump()["usage"]
        print(
            f"{attempt}: prompt_tokens {usage['prompt_tokens']}, "
            f"cached_tokens {usage['prompt_tokens_details']['cached_tokens']}, {took_s:.1f} s"
        )
        time.sleep(STORED_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
