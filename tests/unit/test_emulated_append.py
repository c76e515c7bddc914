"""A DE computes appends itself: the same tokens, every byte compared, and no byte through the PE.

The story: an agent of a few turns.  Its first turn is prefilled by the PE, the later ones append a
few tokens to a context that the DE has in its DRAM, or reads from storage.
"""

from typing import Any

import pytest
from tests.emulated_cluster import GEOMETRY, Cluster, cluster
from tests.unit.test_emulated_dram import total, updated

from dualpath.core.modes import Mode
from dualpath.engine.counters import Counter
from dualpath.router.settings import RouterSettings

PROMPT = list(range(1, 38))
BETWEEN_ENGINES = (Counter.PE_TO_DE_BYTES, Counter.DE_TO_PE_BYTES)


def reasons(made: Cluster) -> list[str]:
    return [one["pe_reason"] for one in made.service.status()["assignments"]]


def bytes_between_engines(made: Cluster) -> float:
    return sum(total(made, counter) for counter in BETWEEN_ENGINES)


async def turns(made: Cluster, append: int, count: int = 4) -> list[tuple[list[int], int]]:
    """Return the tokens and the hit tokens of each turn."""
    context, answers = list(PROMPT), []
    for turn in range(count):
        answer, hits = await made.ask(context, 6)
        answers.append((answer, hits))
        context += [*answer, *range(100 + turn, 100 + turn + append)]
        await made.stored()
        await made.idle()
        await updated(made)
    assert made.counts(1) == 0
    assert made.service.metrics.recomputed_tokens == 0
    return answers


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("append", [2, 13])
async def test_appends_to_a_context_in_dram_move_no_byte_between_engines(
    append: int, ranks: int
) -> None:
    name = f"{append}-{ranks}"
    more: dict[str, Any] = {"decode_tp": ranks, "kv_heads": 2}
    async with cluster(f"memory://append-off-{name}", Mode.DUALPATH, **more) as made:
        expected = await turns(made, append)
        assert "append-at-decode" not in reasons(made)
    settings = RouterSettings(append_at_decode_tokens=24)
    async with cluster(
        f"memory://append-on-{name}", Mode.DUALPATH, router=settings, **more
    ) as made:
        assert await turns(made, append, 1) == expected[:1]
        before = bytes_between_engines(made)
        assert before > 0
        assert await turns(made, append) == expected_again(expected)
        assert reasons(made)[1:] == ["append-at-decode"] * 4
        assert bytes_between_engines(made) == before
        assert total(made, Counter.STORAGE_READ_BYTES) == 0
        assert total(made, Counter.PERSIST_DROPPED_BLOCKS) == 0
        full = [len(PROMPT) + turn * (6 + append) + 5 for turn in range(4)]
        stored = full[-1] // GEOMETRY.block_tokens
        assert total(made, Counter.PERSISTED_BLOCKS) == stored


def expected_again(answers: list[tuple[list[int], int]]) -> list[tuple[list[int], int]]:
    """The first turn is sent again: what it can hit is stored by now."""
    (tokens, _), *others = answers
    hit = (len(PROMPT) - 1) // GEOMETRY.block_tokens * GEOMETRY.block_tokens
    return [(tokens, hit), *others]


async def test_appends_to_a_context_in_storage_are_computed_where_it_is_read() -> None:
    off = RouterSettings(dram_tier=False)
    async with cluster("memory://append-read-off", Mode.DUALPATH, router=off) as made:
        expected = [await made.ask(PROMPT, 6) for _ in range(4)]
    settings = RouterSettings(dram_tier=False, append_at_decode_tokens=24)
    async with cluster("memory://append-read-on", Mode.DUALPATH, router=settings) as made:
        answers = []
        for _ in range(4):
            answers.append(await made.ask(PROMPT, 6))
            await made.stored()
            await made.idle()
        assert answers[0] == expected[0]
        assert [tokens for tokens, _ in answers] == [tokens for tokens, _ in expected]
        shown = made.service.status()["assignments"]
        sides = [one["reads"][0]["side"] for one in shown[1:]]
        assert set(sides) == {"prefill", "decode"}
        appended = [one["pe_reason"] == "append-at-decode" for one in shown[1:]]
        assert appended == [side == "decode" for side in sides]
        assert made.counts(1) == 0
