"""Answers of engines compared token by token, with the gap between the two likeliest tokens."""

from collections.abc import Mapping, Sequence

import msgspec

#: Name of the prompt that continues an answer, so that KV of generated blocks is used.
CONVERSATION = "conversation"
#: Nats between the two likeliest tokens above which rounding does not change the greedy one.
LARGE_GAP = 0.1


class PlainAnswer(msgspec.Struct, frozen=True):
    """A plain engine's answer; ``gaps[i]`` are nats between the two likeliest tokens at step i.

    ``in_other_pieces`` is the answer to the same prompt with KV that was cached before, which was
    computed in other pieces: where the two part, rounding alone changes the token.
    """

    prompt_tokens: int
    ttft_s: float
    tokens: list[int]
    in_other_pieces: list[int]
    gaps: list[float]


def equal_tokens(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of equal tokens before the first different one."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def compared(found: Sequence[int], plain: PlainAnswer | None) -> dict[str, object]:
    """Return columns that compare an answer with a plain engine's, empty without one.

    A difference where the gap is large means wrong KV; where it is small, it may be rounding.
    """
    if plain is None:
        return {}
    equal = max(equal_tokens(found, plain.tokens), equal_tokens(found, plain.in_other_pieces))
    parts = equal < min(len(found), len(plain.tokens))
    gap = plain.gaps[equal] if parts and equal < len(plain.gaps) else None
    return {"equal_tokens": equal, "of": len(plain.tokens), "gap_where_they_part": gap}


def is_wrong(row: Mapping[str, object]) -> bool:
    """Whether an answer with these columns parts where rounding cannot be the cause."""
    gap = row.get("gap_where_they_part")
    return isinstance(gap, float) and gap > LARGE_GAP


def likeliest_gap(logprobs: Sequence[float]) -> float:
    """Return the difference of the two largest log probabilities, 0 with fewer than two."""
    values = sorted(logprobs, reverse=True)
    return values[0] - values[1] if len(values) > 1 else 0.0


def plain_answers(found: Mapping[str, object]) -> dict[str, PlainAnswer]:
    """Return the answers in the findings of phase `plain`, by the name of the prompt."""
    return msgspec.convert(found.get("tokens", {}), dict[str, PlainAnswer])
