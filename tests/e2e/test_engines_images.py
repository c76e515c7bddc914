"""Images through the router with OpenAI's client: a plain engine's tokens, KV per image."""

import base64
import io
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

pytest.importorskip("vllm")

import numpy as np
import openai
from PIL import Image
from tests.e2e.engine_cluster import EngineCluster, tiny_cluster_settings
from tests.e2e.plain_engine import NAME, PlainEngine
from tests.guard import GUARD_S

from dualpath.core.cluster import Role
from dualpath_lab.models.random_models import IMAGE_TOKENS, make_tiny_image_model

pytestmark = [pytest.mark.engine, pytest.mark.long]

BLOCK_TOKENS = 32
QUESTION = "What is in this picture? Say it in the words of the file that you have read. " * 3


def picture(seed: int) -> str:
    """An image as a data: URL."""
    pixels = np.random.default_rng(seed).integers(0, 256, (48, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def asked(image: str, *later: dict[str, Any]) -> list[Any]:
    content = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": QUESTION},
    ]
    return [{"role": "user", "content": content}, *later]


class ChatAnswer(NamedTuple):
    token_ids: list[int]
    text: str
    cached_tokens: int
    prompt_tokens: int


def chat(url: str, messages: list[Any], salt: str | None = None) -> ChatAnswer:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=GUARD_S) as client:
        answer = client.chat.completions.create(
            model=NAME,
            messages=messages,
            max_tokens=40,
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True, "cache_salt": salt},
        )
    usage = answer.usage
    assert usage is not None
    details = usage.prompt_tokens_details
    choice: Any = answer.choices[0]
    cached = (details.cached_tokens or 0) if details else 0
    return ChatAnswer(choice.token_ids, choice.message.content, cached, usage.prompt_tokens)


class Served(NamedTuple):
    cluster: EngineCluster
    #: First turn on one image, second turn, first turn on another image.
    conversations: list[list[Any]]
    plain: list[ChatAnswer]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    model, folder = make_tiny_image_model(), tmp_path_factory.mktemp("images")
    settings = tiny_cluster_settings(model, folder / "storage", block_tokens=BLOCK_TOKENS)
    with EngineCluster(settings, folder) as cluster:
        names = [cluster.start_engine(role, 0) for role in Role]
        with PlainEngine(model, folder, BLOCK_TOKENS) as plain:
            first = chat(plain.url, asked(picture(1)))
            more = [
                {"role": "assistant", "content": first.text},
                {"role": "user", "content": "So?"},
            ]
            conversations = [asked(picture(1)), asked(picture(1), *more), asked(picture(2))]
            answers = [first, *(chat(plain.url, each) for each in conversations[1:])]
        cluster.wait_for(*names)
        yield Served(cluster, conversations, answers)


def test_turns_about_images_get_a_plain_engines_tokens_and_hit_their_own_kv(
    served: Served,
) -> None:
    cluster = served.cluster
    got = []
    for conversation in served.conversations:
        got.append(chat(cluster.url, conversation))
        cluster.wait_idle()
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in served.plain]
    assert got[0].token_ids != got[2].token_ids  # The answer depends on the picture.
    first, second, other = got
    assert first.cached_tokens == other.cached_tokens == 0
    assert second.cached_tokens >= (first.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert second.cached_tokens > IMAGE_TOKENS
    computed = chat(cluster.url, served.conversations[1], "nothing is stored under it")
    assert (computed.token_ids, computed.cached_tokens) == (second.token_ids, 0)


def test_what_the_router_is_not_to_fetch_it_does_not_fetch(served: Served) -> None:
    for url in ("http://127.0.0.1:1/x.png", "https://example.org/x.png"):
        with pytest.raises(openai.BadRequestError):
            chat(served.cluster.url, asked(url))
    # vLLM answers a file URL with an internal error.
    with pytest.raises(openai.InternalServerError, match="--allowed-local-media-path"):
        chat(served.cluster.url, asked("file:///etc/passwd"))
