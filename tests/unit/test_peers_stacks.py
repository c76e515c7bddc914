"""The commands of each peer by node, and equal settings for all stacks."""

import json

import pytest

from dualpath.core.modes import Mode
from dualpath.core.request import Round
from dualpath_lab.benchmarks.peers.comparison import PeersSettings, session
from dualpath_lab.benchmarks.peers.dualpath_stack import RECOMPUTE, DualPathStack
from dualpath_lab.benchmarks.peers.peer_stack import PeerSettings, PeerStack
from dualpath_lab.benchmarks.peers.vllm_lmcache.stack import LMCacheDramStack, LMCacheStack
from dualpath_lab.benchmarks.peers.vllm_mooncake.stack import MooncakeStack
from dualpath_lab.benchmarks.peers.vllm_offloading.stack import OffloadingStack
from dualpath_lab.nodes.machine import Node
from dualpath_lab.nodes.node_processes import NodeCommand

PE, DE0, DE1 = (Node(n, n, f"10.0.0.{i}") for i, n in enumerate(("pe0", "de0", "de1"), start=10))
HEAD = Node("head", "head", "10.0.0.1")
PEERS: list[PeerStack] = [
    LMCacheStack(),
    LMCacheDramStack(),
    OffloadingStack(),
    MooncakeStack(),
]


def settings(*, aggregated: bool = False) -> PeerSettings:
    return PeerSettings(
        python="/env/bin/python",
        model="/model",
        prefill=(PE,),
        decode=(DE0, DE1),
        head=HEAD,
        storage="/storage",
        hbm_bytes=1000,
        dram_bytes=2 << 30,
        aggregated=aggregated,
    )


def option(process: NodeCommand, name: str) -> str:
    return process.argv[process.argv.index(name) + 1]


def engines(processes: list[NodeCommand]) -> dict[str, NodeCommand]:
    return {p.name: p for p in processes if "--kv-transfer-config" in p.argv}


def connectors(process: NodeCommand) -> list[str]:
    config = json.loads(option(process, "--kv-transfer-config"))
    inner = config["kv_connector_extra_config"].get("connectors", [config])
    return [c["kv_connector"] for c in inner]


@pytest.mark.parametrize("stack", PEERS, ids=lambda stack: stack.name)
def test_only_prefill_engines_use_storage_and_decode_engines_only_receive(stack):
    found = engines(stack.commands(settings()))
    assert connectors(found["pe0"])[0] == "NixlConnector"
    assert len(connectors(found["pe0"])) == 2
    assert connectors(found["de0"]) == connectors(found["de1"]) == ["NixlConnector"]


@pytest.mark.parametrize("stack", PEERS, ids=lambda stack: stack.name)
def test_aggregated_every_node_uses_storage_and_there_is_no_pd_transfer(stack):
    processes = stack.commands(settings(aggregated=True))
    found = engines(processes)
    assert set(found) == {"pe0", "de0", "de1"}
    assert all(
        connectors(p) != ["NixlConnector"] and len(connectors(p)) == 1 for p in found.values()
    )
    proxy = next(p for p in processes if p.name == "proxy")
    assert proxy.argv.count("--prefill") == 3
    assert "--decode" not in proxy.argv


@pytest.mark.parametrize("stack", PEERS, ids=lambda stack: stack.name)
def test_no_transfer_bypasses_the_links(stack):
    for process in engines(stack.commands(settings())).values():
        assert process.environment["UCX_TLS"] == "tcp"
        assert process.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] == process.node.address
        assert option(process, "--host") == process.node.address
        assert int(process.environment["PEER_NIXL_PROGRESS_DELAY_US"]) > 0, "no spinning thread"


def test_lmcache_bypasses_the_page_cache_on_the_node_of_its_engine():
    server = LMCacheStack().commands(settings())[0]
    assert server.node == PE
    adapter = json.loads(option(server, "--l2-adapter"))
    assert adapter["use_odirect"] is True
    assert adapter["base_path"].startswith("/storage/")
    assert option(server, "--l1-size-gb") == "8"
    assert option(server, "--l2-store-policy") == "skip_l1"


def test_lmcache_with_a_dram_cache_caches_stored_and_loaded_chunks():
    server = LMCacheDramStack().commands(settings())[0]
    assert option(server, "--l2-store-policy") == "default"
    assert option(server, "--l2-prefetch-policy") == "retain"


def test_dualpath_and_peers_have_the_same_settings():
    own = engines(DualPathStack(Mode.DUALPATH, 25e6, 32768).commands(settings()))
    peer = engines(OffloadingStack().commands(settings()))
    assert set(own) == set(peer)
    for name in own:
        for flag in ("--model", "--dtype", "--block-size", "--max-model-len", "--host"):
            assert option(own[name], flag) == option(peer[name], flag)
        assert option(own[name], "--kv-cache-memory-bytes") == "1000"
        assert own[name].environment["UCX_TLS"] == "tcp"


def test_dualpath_engines_connect_to_the_router_on_the_head_node():
    router, *rest = DualPathStack(Mode.BASIC, 25e6, 32768).commands(settings())
    assert router.node == HEAD
    assert option(router, "--control-host") == HEAD.address
    assert option(router, "--alpha-tokens") == str(3 * 25_000_000 // 32768)
    assert option(router, "--recompute-limit-s") == "0"
    for process in rest:
        extra = json.loads(option(process, "--kv-transfer-config"))["kv_connector_extra_config"]
        assert extra["router"] == f"tcp://{HEAD.address}:5700"
        assert extra["api_url"] == f"http://{process.node.address}:8000"


def test_dualpath_may_recompute_where_that_is_faster():
    stack = DualPathStack(f"split{RECOMPUTE}", 25e6, 32768)
    assert stack.name == "dualpath-split-recompute"
    router, *_ = stack.commands(settings())
    assert option(router, "--recompute-limit-s") == "10"
    assert option(router, "--mode") == "split"
    with pytest.raises(ValueError, match="fast"):
        DualPathStack("fast", 25e6, 32768)


def test_mooncake_has_an_owner_of_dram_and_storage_on_every_node_and_one_master():
    processes = MooncakeStack().commands(settings())
    owners = [p for p in processes if any("mooncake_client" in word for word in p.argv)]
    assert [p.node for p in owners] == [PE, DE0, DE1]
    assert all("--global_segment_size=2147483648" in p.argv for p in owners)
    folders = {p.environment["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] for p in owners}
    assert folders == {f"/storage/mooncake-{name}" for name in ("pe0", "de0", "de1")}
    (master,) = (p for p in processes if p.name == "mooncake-master")
    assert master.node == HEAD
    assert processes.index(master) == 0, "owners and engines connect to it at start"


def test_engines_of_mooncake_have_separate_look_up_sockets():
    found = engines(MooncakeStack().commands(settings(aggregated=True)))
    configs = [json.loads(option(p, "--kv-transfer-config")) for p in found.values()]
    ports = {c["kv_connector_extra_config"]["lookup_rpc_port"] for c in configs}
    assert len(ports) == 3, "they are in one folder of the machine"


def test_agents_have_a_history_and_equal_turns():
    settings = PeersSettings(history=640, turns=2, append=8, generate=4, pause_s=0.5)
    rounds = session(settings, 2).trajectory.rounds
    assert rounds == (Round(640, 1), Round(8, 4, 0.5), Round(8, 4, 0.5))
    assert session(settings, 0).trajectory.rounds[0].append_tokens == 512
