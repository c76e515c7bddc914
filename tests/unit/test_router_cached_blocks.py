"""What the router believes of engines' DRAM, and of what those of a node share."""

import msgspec
import pytest

from dualpath.core.cluster import HostProcess, Role
from dualpath.core.control import (
    CACHE_UPDATE_KEY_BYTES,
    MAX_CACHE_UPDATE_KEYS,
    CacheUpdate,
    NodeDramShare,
)
from dualpath.core.modes import Mode
from dualpath.core.request import CachedPrefix
from dualpath.router.engines import EngineInfo
from dualpath.router.scheduler.cached_blocks import CachedBlockIndex

BLOCK_TOKENS = 4
#: Blocks that a node's engines share.
SHARED = 16
KEYS = [bytes([number]) * 32 for number in range(1, 9)]
SHARE = NodeDramShare("mark", SHARED * BLOCK_TOKENS)


def engine(
    engine_id: str,
    role: Role = Role.DECODE,
    node: str = "n0",
    node_dram: NodeDramShare | None = SHARE,
) -> EngineInfo:
    return EngineInfo(
        engine_id=engine_id,
        epoch="1",
        role=role,
        node=node,
        group=role.value,
        api_url="http://127.0.0.1:1",
        process=HostProcess(),
        order=0,
        hbm_tokens=1000,
        buffer_tokens=8 * BLOCK_TOKENS,
        node_dram=node_dram,
    )


def index_of(*engines: EngineInfo) -> CachedBlockIndex:
    index = CachedBlockIndex()
    for info in engines:
        index.engine_joined(info, BLOCK_TOKENS)
    return index


def update(added: list[bytes], dropped: list[bytes], *, in_node: bool) -> CacheUpdate:
    added_heads, dropped_heads = (
        tuple(key[:CACHE_UPDATE_KEY_BYTES] for key in keys) for keys in (added, dropped)
    )
    return CacheUpdate(added_heads, dropped_heads, in_node)


def blocks_by_engine(index: CachedBlockIndex, mode: Mode = Mode.DUALPATH) -> dict[str, int]:
    prefixes = index.prefixes(KEYS, mode)
    assert all(isinstance(prefix, CachedPrefix) and prefix.blocks for prefix in prefixes)
    return {prefix.engine_id: prefix.blocks for prefix in prefixes}


def test_shared_blocks_that_one_engine_reports_count_for_all_of_the_node() -> None:
    index = index_of(
        engine("d0"), engine("d1"), engine("p0", Role.PREFILL), engine("d2", node="n1")
    )
    index.update("d0", update(KEYS[:3], [], in_node=True))
    assert blocks_by_engine(index) == {"d0": 3, "d1": 3, "p0": 3}
    assert blocks_by_engine(index, Mode.BASIC) == {"p0": 3}
    index.update("p0", update([], KEYS[2:3], in_node=True))
    assert blocks_by_engine(index) == {"d0": 2, "d1": 2, "p0": 2}


def test_an_engine_hits_its_buffer_or_its_node_whichever_has_more() -> None:
    index = index_of(engine("d0"), engine("d1"))
    index.update("d0", update(KEYS[:5], [], in_node=False))
    index.update("d1", update(KEYS[:3], [], in_node=True))
    assert blocks_by_engine(index) == {"d0": 5, "d1": 3}
    assert [index.shared(name, KEYS) for name in ("d0", "d1", "d2")] == [3, 3, 0]
    assert [index.of(name, KEYS) for name in ("d0", "d1", "d2")] == [5, 3, 0]
    index.update("d0", update([], KEYS[1:5], in_node=False))
    assert blocks_by_engine(index) == {"d0": 3, "d1": 3}
    assert index.prefixes(KEYS[4:], Mode.DUALPATH) == ()
    assert index.prefixes([], Mode.DUALPATH) == ()


def test_directories_of_other_ids_and_nodes_are_separate() -> None:
    other = msgspec.structs.replace(SHARE, directory_id="other")
    alone = engine("d3", node_dram=None)
    index = index_of(engine("d0"), engine("d1", node_dram=other), engine("d2", node="n1"), alone)
    for name in ("d0", "d3"):
        index.update(name, update(KEYS, [], in_node=True))
    assert blocks_by_engine(index) == {"d0": len(KEYS)}


def test_shared_blocks_are_indexed_until_the_nodes_last_engine_is_lost() -> None:
    one, other = engine("d0"), engine("d1")
    index = index_of(one, other)
    index.update("d0", update(KEYS, [], in_node=True))
    index.engine_lost(one)
    assert blocks_by_engine(index) == {"d1": len(KEYS)}
    index.engine_joined(one, BLOCK_TOKENS)
    assert blocks_by_engine(index) == {"d0": len(KEYS), "d1": len(KEYS)}
    index.engine_lost(one)
    index.engine_lost(other)
    index.engine_joined(one, BLOCK_TOKENS)
    assert blocks_by_engine(index) == {}
    index.update("d1", update(KEYS, [], in_node=True))
    assert blocks_by_engine(index) == {}


def test_an_engine_that_comes_back_with_another_directory_leaves_the_old_one() -> None:
    index = index_of(engine("d0"))
    index.update("d0", update(KEYS, [], in_node=True))
    index.engine_joined(engine("d0", node_dram=None), BLOCK_TOKENS)
    index.engine_joined(engine("d0"), BLOCK_TOKENS)
    assert blocks_by_engine(index) == {}


@pytest.mark.parametrize(("in_node", "blocks"), [(False, 8), (True, SHARED)])
def test_the_index_is_bounded_by_capacity_and_the_latest_updates_count(
    in_node: bool, blocks: int
) -> None:
    index = index_of(engine("d0"))
    most = 2 * blocks + MAX_CACHE_UPDATE_KEYS
    others = [number.to_bytes(CACHE_UPDATE_KEY_BYTES) for number in range(most)]
    index.update("d0", update(KEYS[:2], [], in_node=in_node))
    index.update("d0", update(others[: most - 2], [], in_node=in_node))
    assert blocks_by_engine(index) == {"d0": 2}
    index.update("d0", update(KEYS[:1], [], in_node=in_node))
    index.update("d0", update(others[most - 2 : most - 1], [], in_node=in_node))
    assert blocks_by_engine(index) == {"d0": 1}
    index.update("d0", update(others[most - 1 :], [], in_node=in_node))
    index.update("d0", update(others[:1], [], in_node=in_node))
    assert blocks_by_engine(index) == {"d0": 1}
    index.update("d0", update([b"%08d" % number for number in range(most)], [], in_node=in_node))
    assert blocks_by_engine(index) == {}
