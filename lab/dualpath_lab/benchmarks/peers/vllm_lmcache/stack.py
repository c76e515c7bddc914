"""vLLM PD over NIXL, with storage through LMCache's server on every prefill node."""

import msgspec

from dualpath_lab.benchmarks.peers.peer_stack import (
    PeerSettings,
    both,
    engine,
    nixl_connector,
    proxy,
)
from dualpath_lab.nodes.machine import Node
from dualpath_lab.nodes.node_processes import NodeCommand

SERVER_PORT = 5555
HTTP_PORT = 8080
_GIB = 1 << 30
#: A look-up without room in L1 is a miss, where other stacks wait: L1 gets more memory.
_BUFFER_FACTOR = 4


class LMCacheStack:
    """Closest to the paper's Basic: only the PE reads storage, the whole prompt before computation.

    DRAM is a buffer and not a cache: as a cache, L1 fills to just below its watermark, never
    evicts, and KV that does not fit is neither stored nor loaded.
    """

    name = "vllm-nixl-lmcache"
    #: L1's copy of a chunk after it was stored, and after a request has loaded it.
    policies = ("--l2-store-policy", "skip_l1", "--l2-prefetch-policy", "default")

    def commands(self, settings: PeerSettings) -> list[NodeCommand]:
        """Return servers, engines and the proxy."""
        lmcache = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://127.0.0.1",
                "lmcache.mp.port": SERVER_PORT,
                "lmcache.mp.save_decode_cache": True,
            },
        }
        storing = lmcache if settings.aggregated else both(nixl_connector(), lmcache)
        environment = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
        return [
            *(server(settings, node, self.policies) for node in settings.storing),
            *(engine(settings, n, storing, environment=environment) for n in settings.storing),
            *(engine(settings, node, nixl_connector()) for node in settings.forwarding),
            proxy(settings),
        ]


class LMCacheDramStack(LMCacheStack):
    """``LMCacheStack`` with L1 as a cache, for agents with KV that fits in the PEs' DRAM."""

    name = "vllm-nixl-lmcache-dram"
    policies = ("--l2-store-policy", "default", "--l2-prefetch-policy", "retain")


def server(settings: PeerSettings, node: Node, policies: tuple[str, ...]) -> NodeCommand:
    """Return LMCache's multi-process server of a node with the given policies of its L1.

    Concurrent reads bypass the page cache (``use_odirect``); several workers serve the engine, so
    that a look-up does not wait for a load.
    """
    adapter = {
        "type": "fs_native",
        "base_path": f"{settings.storage}/lmcache",
        "num_workers": settings.readers,
        "use_odirect": True,
    }
    argv = (
        settings.python, "-m", "lmcache.v1.multiprocess.http_server",
        "--host", "127.0.0.1",
        "--port", str(SERVER_PORT),
        "--http-host", node.address,
        "--http-port", str(HTTP_PORT),
        "--chunk-size", str(settings.chunk_tokens),
        "--max-workers", "4",
        "--supported-transfer-mode", "engine_driven",
        "--shm-name", f"dualpath-peers-{node.name}",
        "--l1-size-gb", f"{_BUFFER_FACTOR * settings.dram_bytes / _GIB:g}",
        "--no-l1-use-lazy",
        "--eviction-policy", "LRU",
        *policies,
        "--l2-adapter", msgspec.json.encode(adapter).decode(),
        "--l2-prefetch-max-in-flight", "16",
    )  # fmt: skip
    return NodeCommand(
        name=f"lmcache-{node.name}",
        node=node,
        argv=argv,
        environment={"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"},
        ready_url=f"http://{node.address}:{HTTP_PORT}/healthcheck",
    )
