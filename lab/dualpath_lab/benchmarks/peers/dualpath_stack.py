"""DualPath's engines as one more stack: the same vLLM and nodes, in one of its modes.

Engines profile themselves at start (``engine.settings.profile``), so that the router knows their
computation times.
"""

from dualpath.core.cluster import nodes_text
from dualpath.core.modes import Mode
from dualpath.launch.settings import LocalClusterSettings
from dualpath_lab.benchmarks.peers.peer_stack import (
    NIXL_ENVIRONMENT,
    OWN_STACK,
    PROXY_PORT,
    PeerSettings,
)
from dualpath_lab.experiments.engine_nodes import cluster_commands
from dualpath_lab.nodes.node_processes import NodeCommand

#: α of Algorithm 1 is what a node reads in 3 s (§A.4).
ALPHA_S = 3.0
#: Suffix of a mode: cached tokens are recomputed where that is faster and takes less than this.
RECOMPUTE, _RECOMPUTE_LIMIT_S = "-recompute", 10.0


class DualPathStack:
    """A router on the head node and an engine on each other node."""

    def __init__(self, variant: str, snic_bytes_per_s: float, kv_bytes_per_token: int) -> None:
        """``variant``: a mode, optionally with ``RECOMPUTE``; raises ``ValueError`` for others."""
        self._mode = Mode(variant.removesuffix(RECOMPUTE))
        self._recompute_limit_s = _RECOMPUTE_LIMIT_S if variant.endswith(RECOMPUTE) else 0.0
        self.name = f"{OWN_STACK}{variant}"
        self._alpha_tokens = max(int(ALPHA_S * snic_bytes_per_s / kv_bytes_per_token), 1)

    def commands(self, settings: PeerSettings) -> list[NodeCommand]:
        """Return router and engines; the router reports when the engines are ready."""
        environment = {k: v for k, v in NIXL_ENVIRONMENT.items() if not k.startswith("PEER_")}
        nodes = (*settings.prefill, *settings.decode)
        return cluster_commands(
            self._cluster(settings), nodes, settings.head, environment, port=PROXY_PORT
        )

    def _cluster(self, settings: PeerSettings) -> LocalClusterSettings:
        return LocalClusterSettings(
            transport="nixl",
            model=settings.model,
            storage=f"{settings.storage}/dualpath",
            nodes=nodes_text(len(settings.prefill), len(settings.decode)),
            mode=self._mode,
            host=settings.head.address,
            dtype="float32",
            max_model_len=settings.max_model_len,
            block_tokens=settings.block_tokens,
            hbm_bytes=settings.hbm_bytes,
            buffer_bytes=settings.dram_bytes,
            decode_prefix_caching=True,
            alpha_tokens=self._alpha_tokens,
            recompute_limit_s=self._recompute_limit_s,
            control_host=settings.head.address,
        )
