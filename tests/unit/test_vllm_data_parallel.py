"""Data-parallel ranks of vLLM as engines: names, the agreed start, the rank of a request."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.guard import GUARD_S
from vllm.config import ParallelConfig

from dualpath.core.cluster import GroupRank
from dualpath.vllm import parallel_ranks


class Ranks:
    """vLLM's group of ranks, each on a thread; all ranks receive what rank 0 broadcasts."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=GUARD_S)
        self.local = threading.local()
        self.value: Any = None

    def broadcast_object(self, value: object, src: int) -> Any:
        assert src == 0
        if self.local.rank == 0:
            self.value = value
        self.barrier.wait()
        return self.value


def parallel(rank: int, **fields: Any) -> Any:
    """The fields of a rank's ``ParallelConfig`` that the code reads."""
    values = {
        "data_parallel_size": 2,
        "data_parallel_rank": rank,
        "data_parallel_index": rank,
        "data_parallel_rank_local": rank,
        "data_parallel_external_lb": False,
        "data_parallel_hybrid_lb": False,
        "enable_elastic_ep": False,
    } | fields
    assert values.keys() <= ParallelConfig.__dataclass_fields__.keys()
    return SimpleNamespace(**values)


def agreed(monkeypatch: pytest.MonkeyPatch, names: list[str], **fields: Any) -> list[GroupRank]:
    """Let all ranks of a group of engines with these names agree."""
    ranks = Ranks(len(names))
    monkeypatch.setattr(parallel_ranks, "get_dp_group", lambda: ranks)
    found: dict[int, GroupRank | None] = {}

    def come_up(rank: int) -> None:
        ranks.local.rank = rank
        config = parallel(rank, **fields)
        name = parallel_ranks.engine_id_of_rank(names[rank], config)
        found[rank] = parallel_ranks.agree_on_group(name, config)

    threads = [threading.Thread(target=come_up, args=(rank,)) for rank in range(len(names))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(GUARD_S)
    return [dp for dp in (found[rank] for rank in range(len(names))) if dp is not None]


def test_ranks_agree_on_one_start_named_after_the_first(monkeypatch):
    first = agreed(monkeypatch, ["pe-0", "pe-0"])
    assert [(dp.group, dp.rank, dp.size) for dp in first] == [("pe-0", 0, 2), ("pe-0", 1, 2)]
    assert len({dp.start for dp in first}) == 1
    again = agreed(monkeypatch, ["pe-0", "pe-0"])
    assert again[0].start != first[0].start


def test_a_group_takes_the_name_of_its_first_rank(monkeypatch):
    found = agreed(monkeypatch, ["prefill-a-8001", "prefill-b-8001"])
    assert {dp.group for dp in found} == {"prefill-a-8001"}


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"data_parallel_external_lb": True}, [None, None]),
        ({}, [0, 1]),
        ({"data_parallel_hybrid_lb": True, "data_parallel_rank_local": 0}, [0, 0]),
    ],
)
def test_requests_to_a_server_of_several_ranks_name_the_rank(monkeypatch, fields, numbers):
    found = agreed(monkeypatch, ["pe-0", "pe-0"], **fields)
    assert [dp.at_server for dp in found] == numbers


def test_an_engine_without_a_group_does_not_communicate(monkeypatch):
    monkeypatch.delattr(parallel_ranks, "get_dp_group")
    assert parallel_ranks.agree_on_group("pe-0", parallel(0, data_parallel_size=1)) is None
