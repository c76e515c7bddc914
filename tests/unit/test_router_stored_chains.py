"""What the scheduler knows of stored chains: when it needs no look-up, and when it makes one."""

import asyncio
from collections.abc import Sequence

import pytest
from tests.unit.router_cluster import Cluster, cluster
from tests.unit.router_fakes import NAMESPACE, FakeEngine, expected, job, keys_of

from dualpath.core.control import Assign, Lookup, StoredChain
from dualpath.router.scheduler.stored_chains import (
    FIRST_PAUSE_S,
    LOOK_UP_S,
    MOST_UNSTORED_BLOCKS,
    TRUST_S,
    StoredChains,
)

# ------------------------------------------------------------------------------------- the index


class Chains:
    """A scheduler's knowledge, with a clock that the test sets; blocks are named by letters."""

    def __init__(self) -> None:
        self.now_s = self.short = 0
        self.chains = StoredChains(lambda: float(self.now_s), self._count)

    def _count(self) -> None:
        self.short += 1

    def writes(
        self, prompt: str, stored: int, engine: str = "d0", *, first: int | None = None
    ) -> None:
        """A prompt of which so many blocks were looked up as stored is complete at a DE."""
        first = stored if first is None else first
        self.chains.note(chain(prompt), first, stored, engine)

    def writes_without_look_up(self, prompt: str, engine: str = "d0") -> None:
        """As ``writes``, of a prompt of which the scheduler has known what is stored."""
        end = self.known(prompt)
        assert end is not None
        keys = chain(prompt)
        self.chains.note(keys, end, end, engine, known=True, whole=end == len(keys))

    def stored(self, prompt: str, answer: str, new_blocks: int, engine: str = "d0") -> None:
        """A DE reports that it has stored the blocks of a prompt and its answer."""
        keys = chain(prompt + answer)
        generated = keys[len(prompt) :]
        self.chains.stored(engine, StoredChain(keys[len(prompt) - 1], generated, new_blocks))

    def known(self, prompt: str) -> int | None:
        return self.chains.end(chain(prompt))


def chain(blocks: str) -> tuple[bytes, ...]:
    """Return the keys of a chain: each stands for all blocks up to its own."""
    return tuple(blocks[: end + 1].encode() for end in range(len(blocks)))


def test_the_next_turn_is_known_once_the_last_one_is_stored() -> None:
    made = Chains()
    made.writes("abc", 0)
    assert made.known("abcDEf") is None
    made.stored("abc", "DE", 5)
    assert made.known("abcDEf") == 5
    made.writes_without_look_up("abcDEf")
    assert made.known("abcDEfGh") is None
    made.stored("abcDEf", "G", 2)
    assert made.known("abcDEfGh") == 7


def test_an_answer_that_the_next_prompt_has_in_other_tokens_is_known_up_to_the_difference() -> None:
    made = Chains()
    made.writes("abc", 0)
    made.stored("abc", "DEF", 6)
    assert [made.known(prompt) for prompt in ("abcDEx", "abcDx", "abcx")] == [5, 4, 3]


def test_a_branch_within_a_prompt_is_looked_up() -> None:
    """Another scheduler may have stored what follows a prefix that many prompts have."""
    made = Chains()
    made.writes("abc", 0)
    made.stored("abc", "D", 4)
    assert [made.known(prompt) for prompt in ("abx", "ax", "x", "")] == [None] * 4


def test_a_prompt_that_is_sent_again_is_known_as_a_whole() -> None:
    made = Chains()
    made.writes("abc", 2)
    made.stored("abc", "D", 2)
    assert (made.known("abc"), made.known("abcD")) == (3, 4)


def test_a_chain_that_others_had_stored_before_is_looked_up() -> None:
    """Its blocks were not new: others may have stored blocks behind them."""
    made = Chains()
    made.writes("abc", 1)
    made.stored("abc", "DE", 3)
    assert made.known("abcDEf") is None
    assert made.short == 0, "the blocks were looked up"


def test_behind_a_prompt_that_was_stored_only_the_answer_is_known() -> None:
    made = Chains()
    made.writes("abc", 3)
    made.stored("abc", "D", 1)
    assert (made.known("abcDe"), made.known("abcx")) == (4, None)


def test_a_chain_with_a_gap_is_looked_up() -> None:
    """A model with windows does not write hits that may lack layers."""
    made = Chains()
    made.writes("abcd", 1, first=3)
    made.stored("abcd", "E", 2)
    assert made.known("abcdEf") is None


def test_of_requests_with_one_prompt_each_is_known_when_all_are_stored() -> None:
    made = Chains()
    made.writes("abc", 3, "d0")
    made.writes("abc", 3, "d1")
    made.stored("abc", "D", 1, "d0")
    assert made.known("abcDx") is None, "d1 may have stored the same answer, and more"
    made.stored("abc", "E", 1, "d1")
    assert (made.known("abcDx"), made.known("abcEx")) == (4, 4)


def test_of_equal_answers_none_is_known() -> None:
    made = Chains()
    made.writes("abc", 3, "d0")
    made.writes("abc", 3, "d1")
    made.stored("abc", "D", 1, "d0")
    made.stored("abc", "DE", 1, "d1")
    assert (made.known("abcDx"), made.known("abcDEx")) == (None, None)


def test_reports_of_two_requests_that_cannot_be_distinguished_count_for_neither() -> None:
    made = Chains()
    made.writes("abc", 3)
    made.writes("abc", 3)
    made.stored("abc", "D", 1)
    made.stored("abc", "E", 1)
    assert (made.known("abcDx"), made.known("abcEx")) == (None, None)


def test_a_report_of_a_chain_that_is_not_known_changes_nothing() -> None:
    made = Chains()
    made.stored("abc", "D", 4)
    made.writes("abc", 0)
    made.stored("abc", "D", 4, "d1")
    assert made.known("abcDe") is None


def test_a_request_that_goes_on_behind_a_stored_chain_makes_it_unknown_at_once() -> None:
    made = Chains()
    made.writes("abc", 0)
    made.stored("abc", "D", 4)
    made.writes_without_look_up("abcD")  # Its new tokens fill no block.
    assert made.known("abcDx") is None
    made.stored("abcD", "E", 1)
    assert (made.known("abcDEx"), made.known("abcDx")) == (5, None)


def test_a_report_that_comes_when_the_next_turn_has_begun_makes_nothing_known() -> None:
    made = Chains()
    made.writes("abc", 0)
    made.writes("abcD", 4)
    made.stored("abc", "D", 4)
    assert made.known("abcDEf") is None, "the answer may be stored already"
    made.stored("abcD", "E", 1)
    assert made.known("abcDEf") == 5


def test_after_a_while_chains_are_looked_up() -> None:
    made = Chains()
    made.writes("abc", 0)
    made.stored("abc", "D", 4)
    made.now_s = int(TRUST_S)
    assert made.known("abcDe") == 4
    made.now_s += 1
    assert made.known("abcDe") is None


def test_a_chain_that_goes_on_is_looked_up_from_time_to_time() -> None:
    """No read shows that storage has lost its blocks while DRAM has them."""
    made, prompt = Chains(), "a"
    made.writes(prompt, 0)
    turns = 0
    while made.now_s <= LOOK_UP_S:
        made.stored(prompt, "B", 2)
        made.now_s += int(TRUST_S)
        prompt += "Bc"
        if made.now_s <= LOOK_UP_S:
            turns += 1
            made.writes_without_look_up(prompt)
    assert turns == LOOK_UP_S / TRUST_S
    assert made.known(prompt) is None
    made.writes(prompt, len(prompt) - 1)
    made.stored(prompt, "B", 2)
    assert made.known(prompt + "Bc") == len(prompt) + 1


def test_a_long_prompt_behind_a_known_end_is_looked_up() -> None:
    made = Chains()
    made.writes("abc", 0)
    made.stored("abc", "", 3)
    assert made.known("abc" + "x" * MOST_UNSTORED_BLOCKS) == 3
    assert made.known("abc" + "x" * (MOST_UNSTORED_BLOCKS + 1)) is None


def test_when_more_was_stored_than_known_all_prompts_are_looked_up_for_a_while() -> None:
    made = Chains()
    for pause_s in (FIRST_PAUSE_S, 2 * FIRST_PAUSE_S):
        at = str(made.now_s)
        made.writes(at + "abc", 0)
        made.stored(at + "abc", "D", 4 + len(at))
        made.writes(at + "xyz", len(at))
        made.stored(at + "xyz", "", 3)
        made.writes_without_look_up(at + "abcDef")  # Another scheduler's engines have stored "e".
        before = made.short
        made.stored(at + "abcDef", "G", 2)
        assert made.short == before + 1
        assert made.known(at + "xyz1") is None
        made.now_s += int(pause_s)
        made.writes(f"{at}-", 0)
        made.stored(f"{at}-", "", len(at) + 1)
        assert made.known(f"{at}-1") == len(at) + 1
        assert made.known(at + "abcDefGh") is None


def test_blocks_that_two_requests_of_one_scheduler_write_are_no_sign_of_another_one() -> None:
    made = Chains()
    made.writes("abc", 0)
    made.stored("abc", "D", 4)
    made.writes_without_look_up("abcDef", "d0")
    made.chains.note(chain("abcDeg"), 4, 4, "d1", known=True)
    made.stored("abcDef", "", 2, "d0")
    made.stored("abcDeg", "", 1, "d1")
    assert made.short == 0


def test_other_weights_have_other_blocks() -> None:
    made = Chains()
    made.writes("abc", 0)
    made.stored("abc", "D", 4)
    made.chains.clear()
    assert made.known("abcDe") is None
    assert made.chains.of(chain("abcDe")) == ()


# ------------------------------------------------------------------------------------- in a cluster

pytestmark = pytest.mark.virtual_time

PROMPT = list(range(100, 118))  # four full blocks and two tokens


def look_ups(made: Cluster) -> int:
    received = [message for engine in made.engines.values() for message in engine.received]
    return sum(isinstance(message, Lookup) for message in received)


def used(engine: FakeEngine) -> list[int]:
    """Return how many blocks of each request count as used in storage by its assignment."""
    return [message.used_blocks for message in engine.received if isinstance(message, Assign)]


async def reporting(made: Cluster) -> None:
    for engine in made.engines.values():
        engine.reports_stored = True


async def turn(made: Cluster, name: str, prompt: Sequence[int]) -> list[int]:
    """Return the prompt of the next turn, which comes when the answer is stored."""
    tokens = await made.run(job(name, prompt))
    assert tokens == expected(prompt, 6)
    await made.settled()
    await asyncio.sleep(1.0)
    return [*prompt, *tokens, 7, 8, 9]


async def test_turns_behind_the_first_one_need_no_look_up() -> None:
    async with cluster() as made:
        await reporting(made)
        prompt = PROMPT
        for number in range(3):
            prompt = await turn(made, f"t{number}", prompt)
        assert look_ups(made) == 1
        hits = [transfer.hit_blocks for transfer in made.calls.transfers]
        assert hits == [0, 4, 6]
        assert used(made.engines["d0"]) == [0, 4, 6], "the storage's janitor has to know it"
        assert b"saved_lookups_total 2.0" in made.service.exposition()


async def test_a_turn_whose_report_is_lost_is_looked_up() -> None:
    async with cluster() as made:
        prompt = await turn(made, "t0", PROMPT)
        await turn(made, "t1", prompt)
        assert look_ups(made) == 2
        assert used(made.engines["d0"]) == [0, 0]


async def test_a_retry_is_looked_up() -> None:
    async with cluster(decode=2) as made:
        await reporting(made)
        prompt = await turn(made, "t0", PROMPT)
        made.calls.gates["decode"] = asyncio.Event()
        run = asyncio.create_task(made.run(job("t1", prompt)))
        await made.arrives("decode")
        assert look_ups(made) == 1
        made.lose(made.calls.decodes[-1])
        made.calls.gates.pop("decode").set()
        assert await run == expected(prompt, 6)
        assert look_ups(made) == 2


async def test_blocks_that_the_janitor_has_removed_are_computed_and_looked_up_again() -> None:
    async with cluster() as made:
        await reporting(made)
        prompt = await turn(made, "t0", PROMPT)
        made.stored.difference_update(keys_of(PROMPT)[2:])
        made.engines["d0"].read_limit = made.engines["p0"].read_limit = lambda read: (
            min(read.run.blocks.count, 2),
            "missing",
        )
        prompt = await turn(made, "t1", prompt)
        assert made.calls.transfers[-1].hit_blocks == 2
        assert look_ups(made) == 1
        await turn(made, "t2", prompt)
        assert look_ups(made) == 2


async def test_engines_with_other_weights_are_asked() -> None:
    async with cluster() as made:
        await reporting(made)
        prompt = await turn(made, "t0", PROMPT)
        for name in ("d0", "p0"):
            made.lose(name)
        made.stored.clear()
        for name, engine in made.engines.items():
            await engine.kill()
            engine.namespace = NAMESPACE.with_weights("step-1-0000000000000001")
            await made.revive(name)
        prompt = await turn(made, "t1", prompt)
        assert look_ups(made) == 1, "of the new processes"
        assert made.calls.transfers[-1].hit_blocks == 0
