"""Stored blocks name their tenant: blocks of prompts, and of answers as well."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.emulated_cluster import Cluster, cluster

from dualpath.core.blocks import tenant_tag
from dualpath.core.modes import Mode
from dualpath.router.settings import RouterSettings
from dualpath.storage.block_file import HEADER_BYTES, BlockHeader, decode_header
from dualpath.storage.chain_index import ChainIndex
from dualpath.storage.inventory import BlockFilter, remove, select_rows
from dualpath.storage.janitor import Survey
from dualpath.storage.objects import PosixObjects

#: 12 Full Blocks of 4 tokens, and a token; all but the last token of the answer fill seven more.
PROMPT, ANSWER_TOKENS = [7, *range(1, 49)], 28
PROMPT_BLOCKS, ANSWER_BLOCKS = 12, 7
SALTS = ["mine", "yours", None]


def lying(storage: Path) -> list[BlockHeader]:
    found = []
    for path in storage.rglob("*.kv"):
        with path.open("rb") as file:
            header = decode_header(file.read(HEADER_BYTES))
        assert header is not None
        found.append(header)
    return found


def by_tenant(storage: Path) -> dict[str, int]:
    return dict(Counter(header.origin.tenant for header in lying(storage)))


async def ask(made: Cluster, salt: str | None) -> tuple[list[int], int]:
    """Send a turn of this tenant, and wait until all its blocks are stored."""
    more: dict[str, Any] = {} if salt is None else {"cache_salt": salt}
    answer, hits = await made.ask(PROMPT, ANSWER_TOKENS, **more)
    await made.stored()
    return answer, hits


@pytest.mark.parametrize(("ranks", "decode"), [(1, 1), (2, 1), (1, 2)])
async def test_blocks_of_prompts_and_answers_name_their_tenant(
    tmp_path: Path, ranks: int, decode: int
) -> None:
    storage = tmp_path / "kv"
    async with cluster(storage, Mode.DUALPATH, decode=decode, decode_tp=ranks) as made:
        for salt in SALTS:
            await ask(made, salt)
        await made.idle()
    each = PROMPT_BLOCKS + ANSWER_BLOCKS
    assert by_tenant(storage) == {tenant_tag(salt): each for salt in SALTS}
    keys = {header.key for header in lying(storage)}
    unknown = [header for header in lying(storage) if header.origin.parent not in keys]
    assert len(unknown) == len(SALTS), "but for each tenant's first all come behind another"


async def test_removing_a_tenant_removes_all_its_answers_and_no_others(tmp_path: Path) -> None:
    storage = tmp_path / "kv"
    async with cluster(storage, Mode.DUALPATH) as made:
        for salt in SALTS:
            await ask(made, salt)
    tree, index = PosixObjects(storage), ChainIndex()
    Survey(tree, index, lambda: 0.0).run_to_end()
    remove(
        tree,
        index,
        select_rows(index, BlockFilter(tenant=tenant_tag("mine"))),
        "me",
        lambda share: None,
    )
    each = PROMPT_BLOCKS + ANSWER_BLOCKS
    assert by_tenant(storage) == {tenant_tag("yours"): each, "": each}


async def test_answers_are_sealed_for_their_tenant_and_read_by_the_next_turn(
    tmp_path: Path,
) -> None:
    storage, file = tmp_path / "kv", tmp_path / "storage.key"
    file.write_text("0" * 64)
    router = RouterSettings(mode=Mode.DUALPATH, dram_tier=False)
    sealed: dict[str, Any] = {"storage_key_file": str(file), "storage_protection": "encrypted"}
    async with cluster(storage, Mode.DUALPATH, router=router, **sealed) as made:
        answer, _ = await ask(made, "mine")
        assert {header.seal is not None for header in lying(storage)} == {True}
        assert by_tenant(storage) == {tenant_tag("mine"): PROMPT_BLOCKS + ANSWER_BLOCKS}
        turn = [*PROMPT, *answer, 5, 6, 7]
        _, hits = await made.ask(turn, 4, cache_salt="mine")
        assert hits == 4 * (PROMPT_BLOCKS + ANSWER_BLOCKS)
        _, hits = await made.ask(turn, 4, cache_salt="yours")
        assert hits == 0
        await made.idle()
        assert made.counts(1) == 0
