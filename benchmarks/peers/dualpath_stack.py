"""DualPath's own engines as one more stack: the same vLLM and nodes, in one of its modes."""

from benchmarks.peers.peer_stack import (
    NIXL_ENVIRONMENT,
    PROXY_PORT,
    PeerProcess,
    PeerSettings,
)

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.emulated_nodes import CLI_MODULE, CONTROL_PORT
from dualpath.laboratory.experiments.vllm_nodes import engine_commands
from dualpath.ops.launch.commands import ENGINE_ENVIRONMENT, router_command
from dualpath.ops.launch.settings import LocalClusterSettings
from dualpath.transport.cluster_secret import SECRET_VARIABLE, new_secret

#: α of Algorithm 1 is what a node reads in 3 s (§A.4).
ALPHA_S = 3.0


class DualPathStack:
    """Router on the head node, an engine on each other."""

    def __init__(self, mode: Mode, snic_bytes_per_s: float, kv_bytes_per_token: int) -> None:
        self.mode = mode
        self.name = f"dualpath-{mode.value}"
        self._alpha_tokens = max(int(ALPHA_S * snic_bytes_per_s / kv_bytes_per_token), 1)

    def processes(self, settings: PeerSettings) -> list[PeerProcess]:
        """Return router and engines; who waits for them asks the router."""
        cluster = self._cluster(settings)
        common = {**ENGINE_ENVIRONMENT, SECRET_VARIABLE: new_secret()}
        environment = {
            **common,
            **{k: v for k, v in NIXL_ENVIRONMENT.items() if not k.startswith("PEER_")},
        }
        router = (settings.python, "-m", CLI_MODULE)
        found = [
            PeerProcess(
                name="router",
                node=settings.head,
                argv=(*router, *router_command(cluster, PROXY_PORT, CONTROL_PORT)),
                environment=common,
            )
        ]
        nodes = (*settings.prefill, *settings.decode)
        found += [
            PeerProcess(
                name=node.name,
                node=node,
                argv=(settings.python, *command),
                environment=environment,
            )
            for node, command in engine_commands(cluster, nodes, settings.head)
        ]
        return found

    def _cluster(self, settings: PeerSettings) -> LocalClusterSettings:
        return LocalClusterSettings(
            model=settings.model,
            storage=f"{settings.storage}/dualpath",
            prefill=len(settings.prefill),
            decode=len(settings.decode),
            mode=self.mode,
            host=settings.head.address,
            dtype="float32",
            max_model_len=settings.max_model_len,
            block_tokens=settings.block_tokens,
            hbm_bytes=settings.hbm_bytes,
            buffer_bytes=settings.dram_bytes,
            alpha_tokens=self._alpha_tokens,
            router_args=("--control-host", settings.head.address),
        )
