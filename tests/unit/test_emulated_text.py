"""Emulated clusters serve text: a tokenizer of words, completions, chats and their streams."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.emulated_cluster import Cluster, cluster
from tests.guard import GUARD_S

from dualpath.core.modes import Mode
from dualpath_lab.emulated.words import VOCAB_SIZE, Words, write_tokenizer

_TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=40)


# ----------------------------------------------------------------------------------- tokenizer


@given(_TOKENS, _TOKENS)
def test_tokens_come_back_from_their_text_however_it_is_streamed(
    first: list[int], rest: list[int]
) -> None:
    text = Words.decode(first) + Words.decode(rest, first=not first)
    assert Words().encode(text) == first + rest
    assert Words().encode(f"  {text}\n") == first + rest


@given(st.text(), st.text())
def test_texts_with_the_same_beginning_have_the_same_first_tokens(one: str, other: str) -> None:
    words = Words()
    shared = words.encode(one)
    assert words.encode(f"{one}\n{other}") == shared + words.encode(other)


def test_other_text_has_about_as_many_tokens_as_with_a_models_tokenizer() -> None:
    text = Path("docs/concepts.md").read_text(encoding="utf-8")
    characters_per_token = len(text) / len(Words().encode(text))
    assert 3.0 < characters_per_token < 5.0, characters_per_token


@given(st.text(alphabet=st.characters(), max_size=30), st.integers(2, 100))
def test_every_text_has_tokens_of_the_vocabulary(text: str, vocab_size: int) -> None:
    assert all(0 <= token < vocab_size for token in Words(vocab_size).encode(text))


def test_the_written_tokenizer_has_the_same_tokens(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizers = pytest.importorskip("tokenizers")
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokens = [0, 7, 31999, 42]
    assert written.decode(tokens) == Words.decode(tokens)
    assert written.encode(Words.decode(tokens)).ids == tokens
    with pytest.raises(Exception, match="WordLevel"):
        written.encode("text of no token")


# ------------------------------------------------------------------------------------ a cluster


@asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[Cluster]:
    async with cluster(folder, Mode.DUALPATH) as made:
        yield made


async def posted(made: Cluster, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    """Return status and JSON of an answer, or the chunks of a stream without its last line."""
    url = f"{made.endpoint}{path}"
    async with asyncio.timeout(GUARD_S), made.http.post(url, json=body) as response:
        answer = await response.read()
    if not body.get("stream") or response.status != 200:
        return response.status, msgspec.json.decode(answer)
    *events, last, empty = answer.decode().split("\n\n")
    assert (last, empty) == ("data: [DONE]", "")
    return response.status, [json.loads(event.removeprefix("data: ")) for event in events]


async def chatted(made: Cluster, *messages: tuple[str, str], **more: Any) -> Any:
    body = {"messages": [{"role": role, "content": text} for role, text in messages], **more}
    status, answer = await posted(made, "/v1/chat/completions", body)
    assert status == 200, answer
    return answer


def test_the_next_turn_of_a_chat_hits_the_whole_turn_before_it(tmp_path: Path) -> None:
    async def chat() -> None:
        async with serving(tmp_path) as made:
            asked = ("user", "List the files of the repository and read the README.")
            first = await chatted(made, asked, max_completion_tokens=9)
            answer = first["choices"][0]["message"]["content"]
            used = first["usage"]
            assert used["completion_tokens"] == 9 == len(Words().encode(answer))
            await made.stored()
            second = await chatted(
                made, asked, ("assistant", answer), ("user", "Go on."), max_completion_tokens=1
            )
            hits = second["usage"]["prompt_tokens_details"]["cached_tokens"]
            # All full blocks of 4 tokens of the first prompt and its answer, whose last token has
            # no KV.
            assert hits == (used["total_tokens"] - 1) // 4 * 4
            assert made.counts(1) == 0

    asyncio.run(chat())


def test_a_stream_has_the_text_and_the_usage_of_the_whole_answer(tmp_path: Path) -> None:
    async def stream() -> None:
        async with serving(tmp_path) as made:
            asked = ("user", "What is a prefix?")
            whole = await chatted(made, asked, max_tokens=5, model="any-name")
            chunks = await chatted(
                *(made, asked), max_tokens=5, stream=True, stream_options={"include_usage": True}
            )
            *tokens, end = chunks
            deltas = [chunk["choices"][0]["delta"] for chunk in tokens]
            assert deltas[0]["role"] == "assistant"
            assert (
                "".join(delta["content"] for delta in deltas)
                == whole["choices"][0]["message"]["content"]
            )
            reasons = [chunk["choices"][0]["finish_reason"] for chunk in tokens]
            assert reasons == [None] * (len(tokens) - 1) + ["length"]
            assert end["choices"] == []
            assert end["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
            assert whole["model"] == "any-name"
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}

            in_every = await chatted(
                *(made, asked),
                max_tokens=3,
                stream=True,
                stream_options={"include_usage": True, "continuous_usage_stats": True},
            )
            counted = [chunk["usage"]["completion_tokens"] for chunk in in_every]
            assert counted == sorted(counted)
            assert counted[0] == 1
            assert counted[-2:] == [3, 3]
            not_asked = await chatted(made, asked, max_tokens=2, stream=True)
            assert all("usage" not in chunk for chunk in not_asked)

    asyncio.run(stream())


def test_a_completion_takes_text_or_token_ids_with_the_same_answer(tmp_path: Path) -> None:
    async def complete() -> None:
        async with serving(tmp_path) as made:
            text = "Two paths lead from the storage to the engines"
            status, answer = await posted(
                made, "/v1/completions", {"prompt": text, "max_tokens": 4}
            )
            assert status == 200
            (choice,) = answer["choices"]
            assert "token_ids" not in choice

            status, tokens = await posted(made, "/tokenize", {"prompt": text})
            assert (status, tokens["count"]) == (200, answer["usage"]["prompt_tokens"])
            generated, _ = await made.ask(tokens["tokens"], 4)
            status, back = await posted(made, "/detokenize", {"tokens": generated})
            assert (status, back["prompt"]) == (200, choice["text"])

            # One prompt may be in a list; without a limit 16 tokens are generated, as in vLLM.
            body = {"prompt": [text], "max_tokens": None, "return_token_ids": True, "n": None}
            status, answer = await posted(made, "/v1/completions", body)
            assert answer["choices"][0]["token_ids"][:4] == generated
            assert answer["usage"]["completion_tokens"] == 16

    asyncio.run(complete())


def test_an_answer_without_a_limit_ends_by_itself_within_the_context(tmp_path: Path) -> None:
    async def chat() -> None:
        async with serving(tmp_path) as made:
            answer = await chatted(made, ("user", "Tell me a story."))
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["usage"]["completion_tokens"] == 256
            long = await chatted(made, ("user", "word " * 400))
            assert long["usage"]["total_tokens"] == 512  # of the engines' --max-model-len

    asyncio.run(chat())


def test_recorded_tool_calls_and_reasoning_are_part_of_the_prompt(tmp_path: Path) -> None:
    async def chat() -> None:
        async with serving(tmp_path) as made:
            call = {"id": "1", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
            messages: list[dict[str, Any]] = [
                {"role": "system", "content": [{"type": "text", "text": "You are an agent."}]},
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "README.md", "tool_call_id": "1"},
            ]
            body = {"messages": messages, "tools": [{"type": "function"}], "max_tokens": 1}
            status, answer = await posted(made, "/v1/chat/completions", body)
            assert status == 200
            _, without = await posted(made, "/tokenize", {"messages": messages[::2]})
            assert answer["usage"]["prompt_tokens"] > without["count"]

    asyncio.run(chat())


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/v1/completions", {"prompt": ["one", "two"]}, "list of 2 prompts"),
        ("/v1/completions", {"prompt": [1, "two"]}, "send text or token ids"),
        ("/v1/completions", {"prompt": 7}, "body of"),
        ("/v1/completions", {"prompt": "text", "n": 2}, "n is 2"),
        ("/v1/completions", {"prompt": "text", "max_tokens": 0}, "max_new_tokens 0"),
        ("/v1/chat/completions", {"prompt": "text"}, "messages"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "'image_url'",
        ),
        ("/tokenize", {}, "neither prompt nor messages"),
        ("/detokenize", {"tokens": "t1"}, "body of"),
    ],
)
def test_what_is_not_served_is_refused_with_a_reason(
    tmp_path: Path, path: str, body: dict[str, Any], reason: str
) -> None:
    async def ask() -> None:
        async with serving(tmp_path) as made:
            status, answer = await posted(made, path, body)
            assert status == 400
            assert reason in answer["error"]["message"]

    asyncio.run(ask())


def test_the_model_is_listed_as_vllm_lists_it(tmp_path: Path) -> None:
    async def ask() -> None:
        async with (
            serving(tmp_path) as made,
            made.http.get(f"{made.endpoint}/v1/models") as response,
        ):
            listed = await response.json()
        assert listed["object"] == "list"
        (model,) = listed["data"]
        assert (model["id"], model["root"], model["max_model_len"]) == (
            *("emulated-small",) * 2,
            512,
        )

    asyncio.run(ask())
