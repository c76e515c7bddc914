"""Real vLLM engines on the nodes of a lab, one per node, and the router on the head node."""

import json
import sys
from collections.abc import Iterable, Iterator
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
from dualpath.laboratory.experiments.node_process import NodeProcesses
from dualpath.laboratory.lab.cluster import LabState, lab_head, lab_nodes
from dualpath.laboratory.lab.machine import Node
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
    """Real engines as a kind of engines for a rig."""

    verifies = False

    def __init__(self, nodes: VllmNodes) -> None:
        self._nodes = nodes

    def start(self, state: LabState, processes: NodeProcesses, mode: Mode, storage: str) -> str:
        """Start router and engines; return the endpoint.  Engines are called as their nodes."""
        head = lab_head(state)
        cluster = self._cluster(state, mode, storage, head.address)
        processes.start_module(
            "router",
            head,
            CLI_MODULE,
            router_command(cluster, ROUTER_PORT, CONTROL_PORT),
            ENGINE_ENVIRONMENT,
        )
        # Shared memory would go past the links of the lab.
        environment = {**ENGINE_ENVIRONMENT, "UCX_TLS": "tcp"}
        for node, command in engine_commands(cluster, lab_nodes(state), head):
            processes.start(node.name, node, (sys.executable, *command), environment)
        return f"http://{head.address}:{ROUTER_PORT}"

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


def engine_commands(
    cluster: LocalClusterSettings, nodes: Iterable[Node], head: Node
) -> Iterator[tuple[Node, tuple[str, ...]]]:
    """Yield every node with the arguments of Python that make an engine on it.

    They find the router on ``head``, at ``CONTROL_PORT``.
    """
    counts = dict.fromkeys(Role, 0)
    for node in nodes:
        role = node_role(node)
        command = engine_command(
            cluster,
            role,
            counts[role],
            ENGINE_PORT,
            CONTROL_PORT,
            host=node.address,
            router_host=head.address,
        )
        counts[role] += 1
        yield node, ("-m", ENGINE_MODULE, *command)
