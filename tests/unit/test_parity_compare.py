"""Where a server cuts a stream into chunks changes nothing of what is compared."""

import itertools
from typing import Any

import pytest
from tests.e2e.parity_compare import differences, joined

#: A call as vLLM's parser says it, piece by piece; each belongs to the call of its index.
CALL: list[dict[str, Any]] = [
    {"index": 0, "id": "call-1", "type": "function", "function": {"name": "weather"}},
    {"index": 0, "function": {"arguments": '{"unit": '}},
    {"index": 0, "function": {"arguments": '"celsius"}'}},
]
WHOLE = [
    {
        "index": 0,
        "id": "call-1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"unit": "celsius"}'},
    }
]


def chunk(**delta: Any) -> dict[str, Any]:
    return {"object": "chunk", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}


@pytest.mark.parametrize("cuts", [*itertools.product((False, True), repeat=2)])
def test_the_pieces_of_a_call_are_put_together_however_they_come(cuts: tuple[bool, ...]) -> None:
    pieces = [[CALL[0]]]
    for piece, cut in zip(CALL[1:], cuts, strict=True):
        if cut:
            pieces.append([])
        pieces[-1].append(piece)
    (event,) = joined(chunk(tool_calls=together) for together in pieces)
    assert event["choices"][0]["delta"]["tool_calls"] == WHOLE


def test_texts_of_two_samples_are_joined_each_on_its_own() -> None:
    one, other = ({"index": index, "text": text} for index, text in enumerate("ab"))
    events = [{"choices": [one]}, {"choices": [other]}, {"choices": [one]}, "[DONE]"]
    assert joined(events) == [
        {"choices": [{"index": 0, "text": "aa"}, {"index": 1, "text": "b"}]},
        "[DONE]",
    ]


def test_logprobs_and_token_ids_are_appended_and_the_last_reason_counts() -> None:
    first = {"index": 0, "token_ids": [1], "logprobs": {"content": [{"token": "a"}]}}
    last = {"index": 0, "token_ids": [2], "logprobs": {"content": [{"token": "b"}]}}
    (event,) = joined([{"choices": [first]}, {"choices": [last | {"finish_reason": "stop"}]}])
    assert event["choices"] == [
        {
            "index": 0,
            "token_ids": [1, 2],
            "logprobs": {"content": [{"token": "a"}, {"token": "b"}]},
            "finish_reason": "stop",
        }
    ]


def test_events_of_one_type_are_one_and_others_stay() -> None:
    events = [
        {"type": "start"},
        {"type": "text", "delta": "a", "at": 1},
        {"type": "text", "delta": "b", "at": 2},
        {"type": "end", "text": "ab"},
    ]
    text = {"type": "text", "delta": "ab", "at": 2}
    assert joined(events) == [events[0], text, events[3]]


def test_a_call_that_lacks_its_arguments_is_a_difference() -> None:
    whole, cut = (joined([chunk(tool_calls=calls)]) for calls in (CALL, CALL[:1]))
    assert list(differences(whole, cut)) == [
        "[0].choices[0].delta.tool_calls[0].function.arguments: only in plain answer"
    ]
