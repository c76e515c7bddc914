"""Emulated engines on the nodes of a lab, one or a group per node, and the router on the head."""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from dualpath.core.addresses import HostPort, tcp_endpoint
from dualpath.core.blocks import slices_of
from dualpath.core.cluster import Role, rank_name
from dualpath.core.modes import Mode
from dualpath.core.settings import arguments
from dualpath.engine.settings import EngineSettings
from dualpath.launch.commands import ENGINE_ENVIRONMENT, engine_command, router_command
from dualpath.launch.settings import LocalClusterSettings
from dualpath.router.settings import RouterSettings
from dualpath.storage.sealed_blocks import STORAGE_KEY_VARIABLE
from dualpath_lab.emulated.settings import EmulatedOptions
from dualpath_lab.experiments.settings import EmulatedNodes, VllmNodes
from dualpath_lab.nodes.cluster import LabState, lab_head, lab_nodes, link_reports, node_cnics
from dualpath_lab.nodes.machine import Node
from dualpath_lab.nodes.node_processes import NodeCommand, module_command
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.catalog.costs import single_engine_costs
from dualpath_sim.simulator.derived import limits
from dualpath_sim.simulator.settings import (
    ClusterSettings,
    DecodeCosts,
    ModelCosts,
    PrefillCosts,
    Setup,
)
from dualpath_sim.simulator.settings import ClusterSettings as SimulatedCluster

CLI_MODULE = "dualpath.cli.main"
ROUTER_PORT, CONTROL_PORT, GROUP_PORT = 8000, 5700, 5702
#: The same in all runs of a lab, so that histories are stored once; not secret.
_STORAGE_KEY = bytes(range(32)).hex()
_Costs = TypeVar("_Costs", PrefillCosts, DecodeCosts)


def simulated_setup(nodes: EmulatedNodes, lab: LabSettings, mode: Mode) -> Setup:
    """Return the same cluster for the simulator: links of the lab, times of the emulated engines.

    Deviations: the simulator has no loopback link; H2D and D2H use its CNIC as in §5.2, but a
    separate link in the lab.  A group's engines share their node's CNIC in the lab; here each has
    its own.
    """
    nodes_per_group = 1 if nodes.engine_groups == "node" else 0
    cluster = ClusterSettings(
        prefill_nodes=lab.prefill,
        decode_nodes=lab.decode,
        gpus_per_node=nodes.prefill_tp * nodes.dp,
        prefill_tp=nodes.prefill_tp,
        decode_tp=nodes.decode_tp,
        prefill_nodes_per_group=nodes_per_group,
        decode_nodes_per_group=nodes_per_group,
        lockstep=nodes.dp_lock_step,
        snic_bytes_per_s=lab.snic_bytes_per_s,
        # Writes are not throttled in the lab.
        snic_write_bytes_per_s=100 * lab.snic_bytes_per_s,
        cnic_bytes_per_s=lab.cnic_bytes_per_s,
        prefill_buffer_bytes=(nodes.buffer_bytes + nodes.dram_bytes) * nodes.dp,
        decode_buffer_bytes=(nodes.buffer_bytes + nodes.dram_bytes) * nodes.dp,
        dram_tier_bytes=0.0 if nodes.dram_tier else None,
        prefill_hbm_bytes=nodes.hbm_bytes,
        decode_hbm_bytes=nodes.hbm_bytes,
        layer_buffers=nodes.layer_buffers,
        overlap_passes=nodes.prefill_tp == 1,
        compute_quota_s=nodes.compute_quota_s / nodes.speedup,
        batch_cap_tokens=nodes.batch_cap_tokens,
        block_tokens=nodes.block_tokens,
        recompute_limit_s=nodes.recompute_limit_s,
    )
    return Setup(cluster=cluster, model=scaled_costs(nodes), mode=mode)


def scaled_costs(nodes: EmulatedNodes) -> ModelCosts:
    """Return the costs of the emulated engines: the model's, divided by ``speedup``."""
    costs = single_engine_costs(nodes.model, nodes.gpu, nodes.prefill_tp)
    return msgspec.structs.replace(
        costs,
        layers=nodes.layers,
        kv_bytes_per_token=nodes.kv_bytes_per_token,
        window_layers=(),
        prefill=_faster(costs.prefill, nodes.speedup),
        decode=_faster(costs.decode, nodes.speedup),
        prefill_replicas=nodes.prefill_tp / slices_of(nodes.prefill_tp, nodes.kv_heads),
        decode_replicas=nodes.decode_tp / slices_of(nodes.decode_tp, nodes.kv_heads),
        prefill_tokens_per_s=costs.prefill_tokens_per_s * nodes.speedup,
    )


class EmulatedEngines:
    """Emulated engines for ``LabRun``."""

    verifies = True

    def __init__(self, nodes: EmulatedNodes) -> None:
        self._nodes = nodes

    def stored_kind(self, mode: Mode) -> str:
        """See ``Engines``."""
        if not mode.moves_bytes:
            return "lengths"
        return "kv" if not self._nodes.seals_blocks else f"kv-{self._nodes.storage_protection}"

    def commands(self, state: LabState, mode: Mode, storage: str) -> Sequence[NodeCommand]:
        """Return the router, then the engines."""
        derived = limits(simulated_setup(self._nodes, state.settings, mode))
        head = lab_head(state)
        control = tcp_endpoint(head.address, CONTROL_PORT)
        options = EmulatedOptions(host=head.address, port=ROUTER_PORT)
        settings = RouterSettings(
            control_host=head.address,
            control_port=CONTROL_PORT,
            mode=mode,
            alpha_tokens=derived.alpha_tokens,
            beta_tokens=derived.beta_tokens,
            dram_tier=self._nodes.dram_tier,
            recompute_limit_s=self._nodes.recompute_limit_s,
            engine_groups=self._nodes.engine_groups,
        )
        router = ["emulate", "router", *arguments(options), *arguments(settings)]
        engines = [
            module_command(
                rank_name(node.name, rank, self._nodes.dp),
                node,
                CLI_MODULE,
                _engine_arguments(self._nodes, state, node, rank, mode, storage, control),
                {STORAGE_KEY_VARIABLE: _STORAGE_KEY} if self._nodes.seals_blocks else {},
            )
            for node in lab_nodes(state)
            for rank in range(self._nodes.dp)
        ]
        return [module_command("router", head, CLI_MODULE, router, ends_last=True), *engines]


def _engine_arguments(
    nodes: EmulatedNodes,
    state: LabState,
    node: Node,
    rank: int,
    mode: Mode,
    storage: str,
    control: str,
) -> list[str]:
    name = rank_name(node.name, rank, nodes.dp)
    throttled = any(link.link == "SNIC" and link.shaped for link in link_reports(state))
    engine = EngineSettings(
        role=node_role(node),
        engine_id=name,
        router=control,
        api_url="",
        storage=storage,
        mode=mode,
        node=node.name,
        buffer_bytes=nodes.buffer_bytes,
        dram_bytes=nodes.dram_bytes,
        storage_protection=nodes.storage_protection,
        # Like memory registered for RDMA: otherwise a send waits while the kernel clears its pages.
        touch_memory=True,
        layer_buffers=nodes.layer_buffers,
        compute_quota_s=nodes.compute_quota_s,
        snic_bytes_per_s=0.0 if throttled else state.settings.snic_bytes_per_s / nodes.dp,
        # Shared memory would bypass the links of the lab.
        transport="nixl",
        ucx_tls="tcp",
        nixl_engine_config={"TCP_PORT_RANGE": state.settings.kv_ports},
        net_devices=node_cnics(state),
        trace_out=nodes.trace_dir and f"{nodes.trace_dir}/{mode.value}-{name}.json",
    )
    options = EmulatedOptions(
        host=node.address,
        model=nodes.model,
        gpu=nodes.gpu,
        layers=nodes.layers,
        kv_bytes_per_token=nodes.kv_bytes_per_token,
        block_tokens=nodes.block_tokens,
        kv_heads=nodes.kv_heads,
        tensor_parallel_size=(
            nodes.prefill_tp if node_role(node) is Role.PREFILL else nodes.decode_tp
        ),
        dp_size=nodes.dp,
        dp_rank=rank,
        dp_lock_step=nodes.dp_lock_step,
        dp_address=str(HostPort(node.address, GROUP_PORT)) if nodes.dp > 1 else "",
        speedup=nodes.speedup,
        hbm_bytes=nodes.hbm_bytes,
        batch_cap_tokens=nodes.batch_cap_tokens,
        verify=nodes.verify,
    )
    return ["emulate", *arguments(engine, positional=("role",)), *arguments(options)]


def node_role(node: Node) -> Role:
    """Return the role of a node, from its name."""
    return Role.PREFILL if node.name.startswith("pe") else Role.DECODE


def _faster(costs: _Costs, speedup: float) -> _Costs:
    times = {
        name: getattr(costs, name) / speedup
        for name in costs.__struct_fields__
        if name.endswith("_s")
    }
    return msgspec.structs.replace(costs, **times)


# -------------------------------------------------------------------------------------- vllm nodes
# Real vLLM engines on the nodes of a lab, one per node, and the router on the head node.

#: Starts with half the CPU time of vLLM's own module.
ENGINE_MODULE = "dualpath.launch.forked_engine"
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
            transport="nixl",
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
            engine_groups=nodes.engine_groups,
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
