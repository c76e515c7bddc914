"""Data-parallel ranks of vLLM as engines: names, the agreed start, the rank of a request."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.guard import GUARD_S
from torch.distributed import HashStore
from vllm.config import ParallelConfig

from dualpath.core.cluster import GroupRank, Role
from dualpath.engine.settings import EngineSettings
from dualpath.transport.nic_pairing import PairedPort
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
        "tensor_parallel_size": 1,
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


# ------------------------------------------------------------------------ NICs of ranks


def network_device(
    parallel_config: Any, rank: int = 0, device: str = "cpu", **fields: Any
) -> str | None:
    """Return UCX's network device of a tensor-parallel rank."""
    settings = EngineSettings(
        role=Role.DECODE, engine_id="de", router="tcp://h:1", api_url="", storage="s", **fields
    )
    found = parallel_ranks.with_own_nic(settings, parallel_config, rank, torch.device(device))
    return found.nixl_engine_config.get("NET_DEVICES")


def test_net_devices_are_counted_over_the_ranks_of_engines_that_share_a_server() -> None:
    ports = tuple(f"mlx5_{number}:1" for number in range(4))
    two_gpus_each = [parallel(rank, tensor_parallel_size=2) for rank in range(2)]
    found = [
        network_device(config, rank, net_devices=ports)
        for config in two_gpus_each
        for rank in range(2)
    ]
    assert found == list(ports)
    own_server = parallel(1, data_parallel_external_lb=True)
    assert network_device(own_server, net_devices=("mlx5_7:1",)) == "mlx5_7:1"


def test_an_engine_of_one_gpu_uses_the_port_nearest_to_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in the paper: every GPU has a CNIC."""
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x81, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    ports = {"0000:81:00.0": PairedPort("mlx5_3:1", near=True, gpus=1)}
    monkeypatch.setattr(parallel_ranks, "local_nic_pairing", lambda: ports)
    alone = parallel(0, data_parallel_size=1)
    with caplog.at_level("INFO"):
        assert network_device(alone, device="cuda:0") == "mlx5_3:1"
        ports["0000:81:00.0"] = PairedPort("mlx5_3:1", near=False, gpus=2)
        assert network_device(alone, device="cuda:0") == "mlx5_3:1"
        ports.clear()
        assert network_device(alone, device="cuda:0") is None
    assert caplog.messages == [
        "rank 0: UCX uses mlx5_3:1, the RDMA port nearest to the GPU",
        "rank 0: UCX uses mlx5_3:1, the nearest RDMA port, which is at another PCI root than the "
        "GPU, shared by 2 GPUs; set net_devices to choose another",
        "rank 0: no RDMA port is up, so UCX chooses the network device",
    ]


def test_passes_are_timed_together_over_the_store_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = HashStore()
    monkeypatch.setattr(parallel_ranks, "_get_default_store", lambda: store)
    assert parallel_ranks.lock_step_of(parallel(0, data_parallel_size=1)) is None
    both = [parallel_ranks.lock_step_of(parallel(rank)) for rank in range(2)]
    assert [step.leads for step in both if step is not None] == [True, False]
    with ThreadPoolExecutor(2) as ranks:
        begun = [ranks.submit(step.begin, True, 7) for step in both if step is not None]
        assert [each.result(GUARD_S) for each in begun] == [7, 7]
