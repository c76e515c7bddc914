"""DualPath's own engines as one more stack: the same vLLM and nodes, in one of its modes."""

from benchmarks.peers.peer_stack import NIXL_ENVIRONMENT, PROXY_PORT, PeerSettings

from dualpath.core.cluster import nodes_text
from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.vllm_nodes import cluster_commands
from dualpath.laboratory.lab.node_processes import NodeCommand
from dualpath.ops.launch.settings import LocalClusterSettings

#: α of Algorithm 1 is what a node reads in 3 s (§A.4).
ALPHA_S = 3.0


class DualPathStack:
    """Router on the head node, an engine on each other."""

    def __init__(self, mode: Mode, snic_bytes_per_s: float, kv_bytes_per_token: int) -> None:
        self.mode = mode
        self.name = f"dualpath-{mode.value}"
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
            mode=self.mode,
            host=settings.head.address,
            dtype="float32",
            max_model_len=settings.max_model_len,
            block_tokens=settings.block_tokens,
            hbm_bytes=settings.hbm_bytes,
            buffer_bytes=settings.dram_bytes,
            decode_prefix_caching=True,
            alpha_tokens=self._alpha_tokens,
            control_host=settings.head.address,
        )
