"""vLLM PD over NIXL, with Mooncake Store over the DRAM and storage of every node."""

from pathlib import Path

from dualpath_lab.benchmarks.peers.peer_stack import (
    PeerSettings,
    both,
    engine,
    nixl_connector,
    proxy,
)
from dualpath_lab.nodes.machine import Node
from dualpath_lab.nodes.node_processes import NodeCommand

MASTER_PORT = 50051
METRICS_PORT = 9003
OWNER_PORT = 50052
HEALTH_PORT = 9300
_MIB = 1 << 20
#: Buffer of an owner for reads from storage, large enough for several prompts.
_STAGING_BYTES = 256 * _MIB


class MooncakeStack:
    """A pool that includes decode nodes: blocks in their storage are read through their NICs.

    A block's node is chosen at random when it is stored, not by queue length when it is read.
    """

    name = "vllm-nixl-mooncake"

    def commands(self, settings: PeerSettings) -> list[NodeCommand]:
        """Return the master, an owner of DRAM and storage on each node, engines and the proxy."""
        return [
            master(settings),
            *(owner(settings, node) for node in (*settings.prefill, *settings.decode)),
            *(
                engine(
                    settings, node, _transfer(settings, index), environment=_host_environment(node)
                )
                for index, node in enumerate(settings.storing)
            ),
            *(engine(settings, node, nixl_connector()) for node in settings.forwarding),
            proxy(settings),
        ]


def master(settings: PeerSettings) -> NodeCommand:
    """Return the master, which knows the node of each block and makes its owner write it.

    Without room, a block is refused and not stored, so the master evicts early.
    """
    address = settings.head.address
    return NodeCommand(
        name="mooncake-master",
        node=settings.head,
        argv=(
            _binary(settings, "mooncake_master"),
            f"--rpc_address={address}",
            f"--rpc_port={MASTER_PORT}",
            f"--metrics_port={METRICS_PORT}",
            "--enable_offload=true",
            "--eviction_high_watermark_ratio=0.8",
            "--logtostderr",
        ),
        ready_url=f"http://{address}:{METRICS_PORT}/metrics",
    )


def owner(settings: PeerSettings, node: Node) -> NodeCommand:
    """Return the process that owns a node's part of the pool, in DRAM and in storage.

    It bypasses the page cache (``USE_URING``), as the shaped links require.  By default a storage
    file is written once it has 500 blocks or 256 MiB, and the rest waits in DRAM; here each block
    is a file, as with the other stacks.
    """
    folder = Path(settings.storage) / f"mooncake-{node.name}"
    return NodeCommand(
        name=f"mooncake-{node.name}",
        node=node,
        argv=(
            "/bin/sh", "-c", f"mkdir -p {folder} && exec \"$@\"", "sh",
            _binary(settings, "mooncake_client"),
            f"--host={node.address}",
            f"--port={OWNER_PORT}",
            f"--master_server_address={settings.head.address}:{MASTER_PORT}",
            "--metadata_server=P2PHANDSHAKE",
            "--protocol=tcp",
            f"--global_segment_size={settings.dram_bytes}",
            f"--threads={settings.readers}",
            "--enable_offload=true",
            "--enable_http_server=true",
            f"--http_port={HEALTH_PORT}",
            "--logtostderr",
        ),
        environment={
            "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": str(folder),
            "MOONCAKE_OFFLOAD_USE_URING": "true",
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": "1",
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(_STAGING_BYTES),
        },
        ready_url=f"http://{node.address}:{HEALTH_PORT}/health",
    )  # fmt: skip


def _transfer(settings: PeerSettings, index: int) -> dict[str, object]:
    """Return the KV transfer config of storing engine number ``index``."""
    store: dict[str, object] = {
        "kv_connector": "CPUMooncakeStoreConnector",
        "kv_connector_module_path": "vllm_mooncake.peer_mooncake_store",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            # Look-ups use a socket in the file system of this machine, which all nodes share.
            "lookup_rpc_port": index,
            "save_decode_cache": True,
            "store": {
                "mode": "standalone-store",
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": f"{settings.head.address}:{MASTER_PORT}",
                "global_segment_size": 0,
                "local_buffer_size": 64 * _MIB,
                "protocol": "tcp",
                "enable_offload": True,
            },
        },
    }
    return store if settings.aggregated else both(nixl_connector(), store)


def _host_environment(node: Node) -> dict[str, str]:
    return {
        "MOONCAKE_REQUESTER_LOCAL_HOSTNAME": node.address,
        "VLLM_MOONCAKE_LOAD_RECV_THREADS": "4",
    }


def _binary(settings: PeerSettings, name: str) -> str:
    return str(Path(settings.python).parent / name)
