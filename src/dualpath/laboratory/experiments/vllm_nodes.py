"""Real vLLM engines on the nodes of a lab, one per node, and the router on the head node."""

from collections.abc import Mapping, Sequence

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.emulated_nodes import (
    CLI_MODULE,
    CONTROL_PORT,
    ROUTER_PORT,
    node_role,
)
from dualpath.laboratory.experiments.settings import VllmNodes
from dualpath.laboratory.lab.cluster import LabState, lab_head, lab_nodes
from dualpath.laboratory.lab.machine import Node
from dualpath.laboratory.lab.node_processes import NodeCommand, module_command
from dualpath.model.sim.settings import ClusterSettings as SimulatedCluster
from dualpath.ops.launch.commands import ENGINE_ENVIRONMENT, engine_command, router_command
from dualpath.ops.launch.settings import LocalClusterSettings

#: Starts with half the CPU time of vLLM's own module.
ENGINE_MODULE = "dualpath.ops.launch.forked_engine"
ENGINE_PORT = 8000


class VllmEngines:
    """vLLM engines for ``LabRun``."""

    verifies = False

    def __init__(self, nodes: VllmNodes) -> None:
        self._nodes = nodes

    def stored_kind(self, mode: Mode) -> str:
        """See ``Engines``."""
        return "kv" if mode.moves_bytes else "lengths"

    def commands(self, state: LabState, mode: Mode, storage: str) -> Sequence[NodeCommand]:
        """Return the router, then the engines."""
        head = lab_head(state)
        cluster = self._cluster(state, mode, storage, head.address)
        # Shared memory would bypass the links of the lab.
        return cluster_commands(cluster, lab_nodes(state), head, {"UCX_TLS": "tcp"})

    def _cluster(
        self, state: LabState, mode: Mode, storage: str, host: str
    ) -> LocalClusterSettings:
        lab, nodes = state.settings, self._nodes
        seconds = SimulatedCluster(prefill_nodes=1, decode_nodes=1).alpha_s
        return LocalClusterSettings(
            model=nodes.model,
            storage=storage,
            nodes=lab.nodes,
            mode=mode,
            host=host,
            dtype=nodes.dtype,
            max_model_len=nodes.max_model_len,
            block_tokens=nodes.block_tokens,
            hbm_bytes=nodes.hbm_bytes,
            buffer_bytes=nodes.buffer_bytes,
            dram_tier=nodes.dram_tier,
            compute_quota_s=nodes.compute_quota_s,
            alpha_tokens=int(seconds * lab.snic_bytes_per_s / nodes.kv_bytes_per_token),
            nixl_engine_config={"TCP_PORT_RANGE": lab.kv_ports},
            control_host=host,
        )


def cluster_commands(
    cluster: LocalClusterSettings,
    nodes: Sequence[Node],
    head: Node,
    engine_environment: Mapping[str, str],
    *,
    port: int = ROUTER_PORT,
) -> list[NodeCommand]:
    """Return the router on ``head``, which serves at ``port``, then an engine on each of ``nodes``.

    Engines have the names of their nodes and connect to the router at ``CONTROL_PORT``.
    """
    router = router_command(cluster, port, CONTROL_PORT)
    commands = [
        module_command("router", head, CLI_MODULE, router, ENGINE_ENVIRONMENT, ends_last=True)
    ]
    counts = dict.fromkeys(Role, 0)
    for node in nodes:
        role = node_role(node)
        arguments = engine_command(
            cluster,
            role,
            counts[role],
            ENGINE_PORT,
            CONTROL_PORT,
            host=node.address,
            router_host=head.address,
        )
        counts[role] += 1
        environment = {**ENGINE_ENVIRONMENT, **engine_environment}
        commands.append(module_command(node.name, node, ENGINE_MODULE, arguments, environment))
    return commands
