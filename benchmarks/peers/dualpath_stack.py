"""DualPath's own engines as one more stack: the same vLLM and nodes, in one of its modes.

Engines time themselves at start (``engine.settings.profile``), so that the router knows what
computing takes.
"""

from benchmarks.peers.peer_stack import NIXL_ENVIRONMENT, OWN_STACK, PROXY_PORT, PeerSettings

from dualpath.core.cluster import nodes_text
from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.vllm_nodes import cluster_commands
from dualpath.laboratory.lab.node_processes import NodeCommand
from dualpath.ops.launch.settings import LocalClusterSettings

#: α of Algorithm 1 is what a node reads in 3 s (§A.4).
ALPHA_S = 3.0
#: After a mode: hits are computed again where that is faster, and done in this time.
RECOMPUTE, _RECOMPUTE_LIMIT_S = "-recompute", 10.0


class DualPathStack:
    """Router on the head node, an engine on each other."""

    def __init__(self, way: str, snic_bytes_per_s: float, kv_bytes_per_token: int) -> None:
        """``way`` is a mode, or a mode and ``RECOMPUTE``; raises ``ValueError`` for another."""
        self._mode = Mode(way.removesuffix(RECOMPUTE))
        self._recompute_limit_s = _RECOMPUTE_LIMIT_S if way.endswith(RECOMPUTE) else 0.0
        self.name = f"{OWN_STACK}{way}"
        self._alpha_tokens = max(int(ALPHA_S * snic_bytes_per_s / kv_bytes_per_token), 1)

    def commands(self, settings: PeerSettings) -> list[NodeCommand]:
        """Return router and engines; who waits for them asks the router."""
        environment = {k: v for k, v in NIXL_ENVIRONMENT.items() if not k.startswith("PEER_")}
        nodes = (*settings.prefill, *settings.decode)
        return cluster_commands(
            self._cluster(settings), nodes, settings.head, environment, port=PROXY_PORT
        )

    def _cluster(self, settings: PeerSettings) -> LocalClusterSettings:
        return LocalClusterSettings(
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
