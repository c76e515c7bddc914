"""A peer's interface to the measurement: commands of its processes on the nodes of a lab."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from dualpath.launch.commands import ENGINE_ENVIRONMENT
from dualpath_lab.nodes.machine import Node
from dualpath_lab.nodes.node_processes import NodeCommand

ENGINE_PORT = 8000
PROXY_PORT = 8100
SIDE_CHANNEL_PORT = 5600
#: Prefix of the names of DualPath's stacks, followed by a mode.
OWN_STACK = "dualpath-"

#: NIXL as configured for DualPath in a lab: only TCP, because shared memory would bypass the links,
#: with the ports of the KV traffic class; a progress thread that sleeps between polls (1000 us,
#: read by ``peer_engine.py``), because a spinning one would occupy a core.
NIXL_ENVIRONMENT = {
    "UCX_TLS": "tcp",
    "UCX_TCP_PORT_RANGE": "20480-24575",
    "UCX_TCP_TX_SEG_SIZE": "256K",
    "UCX_TCP_RX_SEG_SIZE": "1M",
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "NIXL_LOG_LEVEL": "WARN",
    "PEER_NIXL_PROGRESS_DELAY_US": "1000",
}


class PeerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that are equal for all stacks.

    ``python`` is the interpreter of the stack's environment, ``hbm_bytes`` an engine's KV memory,
    ``dram_bytes`` the size of a node's cache or staging area in DRAM, ``chunk_tokens`` the size of
    a stored file, a multiple of ``block_tokens``, ``readers`` the number of reading threads.
    ``aggregated``: no disaggregation, every node runs prefill and decode and uses storage.
    """

    python: str
    model: str
    prefill: tuple[Node, ...]
    decode: tuple[Node, ...]
    head: Node
    storage: str
    hbm_bytes: int
    dram_bytes: int
    block_tokens: int = 64
    chunk_tokens: int = 64
    max_model_len: int = 4096
    readers: int = 8
    aggregated: bool = False

    @property
    def storing(self) -> tuple[Node, ...]:
        """The nodes that read and write storage."""
        return (*self.prefill, *self.decode) if self.aggregated else self.prefill

    @property
    def forwarding(self) -> tuple[Node, ...]:
        """The nodes that only decode."""
        return () if self.aggregated else self.decode


class PeerStack(Protocol):
    """One stack; ``commands`` are in start order, an engine after the processes it requires."""

    name: str

    def commands(self, settings: PeerSettings) -> list[NodeCommand]:
        """Return the commands with their nodes."""


def engine(
    settings: PeerSettings,
    node: Node,
    transfer: Mapping[str, object],
    extra: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
) -> NodeCommand:
    """Return a vLLM engine like DualPath's, but with ``transfer`` as its KV transfer config."""
    url = f"http://{node.address}:{ENGINE_PORT}"
    options = (
        "--model", settings.model,
        "--host", node.address,
        "--port", str(ENGINE_PORT),
        "--dtype", "float32",
        "--block-size", str(settings.block_tokens),
        "--max-model-len", str(settings.max_model_len),
        "--kv-cache-memory-bytes", str(settings.hbm_bytes),
        "--prefix-caching-hash-algo", "sha256_cbor",
        "--enable-prefix-caching",
        "--enable-prompt-tokens-details",
        "--enforce-eager",
        "--disable-uvicorn-access-log",
        "--kv-transfer-config", msgspec.json.encode(transfer).decode(),
    )  # fmt: skip
    return NodeCommand(
        name=node.name,
        node=node,
        argv=(settings.python, _script("peer_engine.py"), *options, *extra),
        environment={
            **ENGINE_ENVIRONMENT,
            **NIXL_ENVIRONMENT,
            "VLLM_NIXL_SIDE_CHANNEL_HOST": node.address,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(SIDE_CHANNEL_PORT),
            **(environment or {}),
        },
        ready_url=f"{url}/health",
    )


def nixl_connector() -> dict[str, object]:
    """Return the config of vLLM's PD transfer over NIXL between buffers in DRAM.

    ``num_threads`` is 0 because further UCX threads would compete for two cores.
    """
    return {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_connector_extra_config": {"num_threads": 0},
    }


def both(*connectors: Mapping[str, object]) -> dict[str, object]:
    """Return a config with several connectors; the first one with a hit loads it."""
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": list(connectors)},
    }


def proxy(settings: PeerSettings) -> NodeCommand:
    """Return the PD proxy on the head node, in the stack's environment."""
    argv = [settings.python, _script("pd_proxy.py"), "--host", settings.head.address]
    argv += ["--port", str(PROXY_PORT)]
    for node in settings.storing:
        argv += ["--prefill", f"http://{node.address}:{ENGINE_PORT}"]
    for node in settings.forwarding:
        argv += ["--decode", f"http://{node.address}:{ENGINE_PORT}"]
    url = f"http://{settings.head.address}:{PROXY_PORT}"
    return NodeCommand(
        name="proxy", node=settings.head, argv=tuple(argv), ready_url=f"{url}/health"
    )


def _script(file: str) -> str:
    return str(Path(__file__).parent / file)
