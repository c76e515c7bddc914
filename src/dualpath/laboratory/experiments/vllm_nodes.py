"""Real vLLM engines on the nodes of a lab, one per node, and the router on the head node."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.emulated_nodes import (
    CLI_MODULE,
    CONTROL_PORT,
    MIB,
    ROUTER_PORT,
    node_role,
)
from dualpath.laboratory.lab.cluster import LabState, lab_head, lab_nodes
from dualpath.laboratory.lab.machine import Node
from dualpath.laboratory.lab.node_processes import NodeCommand, module_command
from dualpath.model.sim.settings import ClusterSettings as SimulatedCluster
from dualpath.ops.launch.commands import ENGINE_ENVIRONMENT, engine_command, router_command
from dualpath.ops.launch.settings import LocalClusterSettings

#: Starting takes half the processor time of vLLM's own module.
ENGINE_MODULE = "dualpath.ops.launch.forked_engine"
ENGINE_PORT = 8000
_BYTES_OF = {"float32": 4, "bfloat16": 2, "float16": 2}


class VllmNodes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The vLLM engines of a lab, all alike.

    ``model`` is a folder with weights, as `dualpath model wide` makes one.
    """

    model: str
    dtype: str = "float32"
    block_tokens: int = 64
    max_model_len: int = 8192
    hbm_mib: int = 512
    buffer_mib: int = 512
    compute_quota_s: float = 4.0

    def check(self) -> None:
        """Raise ``ConfigError`` for a model that is no folder with a config.json."""
        if not (Path(self.model) / "config.json").is_file():
            raise ConfigError(
                f"model {self.model!r} is no folder with a config.json; `dualpath model wide` "
                "makes one and prints its path"
            )

    @property
    def kv_bytes_per_token(self) -> float:
        """KV of a token over all layers, by the model's config.json (no MLA)."""
        config = json.loads((Path(self.model) / "config.json").read_text(encoding="utf-8"))
        heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        dimension = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        words = 2 * config["num_hidden_layers"] * heads * dimension
        return float(words * _BYTES_OF.get(self.dtype, 2))


class VllmEngines:
    """Real engines as a kind of engines for ``LabRun``."""

    verifies = False

    def __init__(self, nodes: VllmNodes) -> None:
        self._nodes = nodes

    def commands(self, state: LabState, mode: Mode, storage: str) -> Sequence[NodeCommand]:
        """Return the router, then the engines."""
        head = lab_head(state)
        cluster = self._cluster(state, mode, storage, head.address)
        # Shared memory would go past the links of the lab.
        return cluster_commands(cluster, lab_nodes(state), head, {"UCX_TLS": "tcp"})

    def _cluster(
        self, state: LabState, mode: Mode, storage: str, host: str
    ) -> LocalClusterSettings:
        lab, nodes = state.settings, self._nodes
        seconds = SimulatedCluster(prefill_nodes=1, decode_nodes=1).alpha_s
        return LocalClusterSettings(
            model=nodes.model,
            storage=storage,
            prefill=lab.prefill,
            decode=lab.decode,
            mode=mode,
            host=host,
            dtype=nodes.dtype,
            max_model_len=nodes.max_model_len,
            block_tokens=nodes.block_tokens,
            hbm_bytes=nodes.hbm_mib * MIB,
            buffer_bytes=nodes.buffer_mib * MIB,
            compute_quota_s=nodes.compute_quota_s,
            alpha_tokens=int(seconds * lab.snic_bytes_per_s / nodes.kv_bytes_per_token),
            nixl_engine_config={"TCP_PORT_RANGE": lab.kv_ports},
            router_args=("--control-host", host),
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

    Engines are called as their nodes, and find the router at ``CONTROL_PORT``.
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
