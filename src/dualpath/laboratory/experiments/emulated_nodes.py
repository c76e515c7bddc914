"""Emulated engines on the nodes of a lab, one per node, and their router on the head node."""

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.laboratory.emulated.settings import block_geometry
from dualpath.laboratory.lab.cluster import LabState, lab_head, lab_nodes, link_reports
from dualpath.laboratory.lab.machine import Node
from dualpath.laboratory.lab.node_processes import NodeCommand, module_command
from dualpath.laboratory.lab.settings import LabSettings
from dualpath.model.catalog.costs import single_engine_costs
from dualpath.model.sim.derived import limits
from dualpath.model.sim.settings import (
    ClusterSettings,
    DecodeCosts,
    ModelCosts,
    PrefillCosts,
    Setup,
)

CLI_MODULE = "dualpath.cli.main"
ROUTER_PORT, CONTROL_PORT = 8000, 5700
MIB = 1 << 20
_Costs = TypeVar("_Costs", PrefillCosts, DecodeCosts)


class EmulatedNodes(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The emulated engines of a lab, all alike; see ``emulated.settings``.

    ``model`` names the costs, divided by ``speedup``.  ``layers`` and ``layer_block_bytes`` (of
    ``block_tokens`` tokens) replace the model's: the default is a DeepSeek Layer Block of 42 KiB in
    a few layers, so that blocks have their real size and prompts fit the links.
    """

    model: str = "qwen2.5-32b"
    gpu: str = "hopper"
    layers: int = 8
    block_tokens: int = 64
    layer_block_bytes: int = 42 << 10
    speedup: float = 50.0
    buffer_mib: int = 768
    hbm_mib: int = 768
    layer_buffers: int = 2
    compute_quota_s: float = 0.3
    batch_cap_tokens: int = 1024
    verify: str = "sampled"
    progress_delay_us: int = 5000

    @property
    def kv_bytes_per_token(self) -> float:
        """KV of a token over all layers."""
        return self.layers * self.layer_block_bytes / self.block_tokens

    def check(self) -> None:
        """Raise ``ConfigError`` for blocks that are not a whole number of words per token."""
        made = block_geometry(self.layers, self.block_tokens, self.kv_bytes_per_token)
        if made.layer_block_bytes != self.layer_block_bytes:
            raise ConfigError(
                f"layer_block_bytes is {self.layer_block_bytes}, must be a multiple of "
                f"{made.layer_block_bytes // self.block_tokens * self.block_tokens or 8} for "
                f"{self.block_tokens} tokens; correct it"
            )


def simulated_setup(nodes: EmulatedNodes, lab: LabSettings, mode: Mode) -> Setup:
    """Return the same cluster for the simulator: links of the lab, times of the emulated engines.

    Deviation: the simulator has no loopback leg; H2D and D2H load its CNIC as in §5.2, which in the
    lab have a link of their own.
    """
    cluster = ClusterSettings(
        prefill_nodes=lab.prefill,
        decode_nodes=lab.decode,
        gpus_per_node=1,
        prefill_nodes_per_group=0,
        decode_nodes_per_group=0,
        lockstep=False,
        snic_bytes_per_s=lab.snic_bytes_per_s,
        # Writes are not throttled in the lab.
        snic_write_bytes_per_s=100 * lab.snic_bytes_per_s,
        cnic_bytes_per_s=lab.cnic_bytes_per_s,
        prefill_buffer_bytes=nodes.buffer_mib * MIB,
        decode_buffer_bytes=nodes.buffer_mib * MIB,
        prefill_hbm_bytes=nodes.hbm_mib * MIB,
        decode_hbm_bytes=nodes.hbm_mib * MIB,
        layer_buffers=nodes.layer_buffers,
        compute_quota_s=nodes.compute_quota_s / nodes.speedup,
        batch_cap_tokens=nodes.batch_cap_tokens,
        block_tokens=nodes.block_tokens,
    )
    return Setup(cluster=cluster, model=scaled_costs(nodes), mode=mode)


def scaled_costs(nodes: EmulatedNodes) -> ModelCosts:
    """Return the costs of the emulated engines: the model's, ``speedup`` times as fast."""
    costs = single_engine_costs(nodes.model, nodes.gpu)
    return msgspec.structs.replace(
        costs,
        layers=nodes.layers,
        kv_bytes_per_token=nodes.kv_bytes_per_token,
        prefill=_faster(costs.prefill, nodes.speedup),
        decode=_faster(costs.decode, nodes.speedup),
        prefill_tokens_per_s=costs.prefill_tokens_per_s * nodes.speedup,
    )


class EmulatedEngines:
    """Emulated engines as a kind of engines for ``LabRun``."""

    verifies = True

    def __init__(self, nodes: EmulatedNodes) -> None:
        self._nodes = nodes

    def commands(self, state: LabState, mode: Mode, storage: str) -> Sequence[NodeCommand]:
        """Return the router, then the engines."""
        derived = limits(simulated_setup(self._nodes, state.settings, mode))
        head = lab_head(state)
        control = f"tcp://{head.address}:{CONTROL_PORT}"
        router = [
            *("emulate", "router", "--host", head.address, "--port", str(ROUTER_PORT)),
            *("--control", control, "--mode", mode.value),
            *("--alpha-tokens", str(derived.alpha_tokens)),
            *("--beta-tokens", str(derived.beta_tokens)),
        ]
        engines = [
            module_command(
                node.name,
                node,
                CLI_MODULE,
                _engine_arguments(self._nodes, state, node, mode, storage, control),
            )
            for node in lab_nodes(state)
        ]
        return [module_command("router", head, CLI_MODULE, router, ends_last=True), *engines]


def _engine_arguments(
    nodes: EmulatedNodes, state: LabState, node: Node, mode: Mode, storage: str, control: str
) -> list[str]:
    arguments = [
        *("emulate", node_role(node).value, "--engine-id", node.name, "--node", node.name),
        *("--host", node.address, "--control", control, "--storage", storage),
        *("--mode", mode.value, "--model", nodes.model, "--gpu", nodes.gpu),
        *("--layers", str(nodes.layers), "--block-size", str(nodes.block_tokens)),
        *("--kv-bytes-per-token", f"{nodes.kv_bytes_per_token:.17g}"),
        *("--speedup", f"{nodes.speedup:g}", "--verify", nodes.verify),
        *("--buffer-mib", str(nodes.buffer_mib), "--hbm-mib", str(nodes.hbm_mib)),
        *("--layer-buffers", str(nodes.layer_buffers)),
        *("--compute-quota-s", f"{nodes.compute_quota_s:g}"),
        *("--batch-cap-tokens", str(nodes.batch_cap_tokens)),
        *("--progress-delay-us", str(nodes.progress_delay_us)),
        # Shared memory would go past the links of the lab.
        *("--ucx-tls", "tcp", "--kv-ports", state.settings.kv_ports),
    ]
    if not any(link.link == "SNIC" and link.shaped for link in link_reports(state)):
        arguments += ["--snic-mb-per-s", f"{state.settings.snic_bytes_per_s / 1e6:g}"]
    return arguments


def node_role(node: Node) -> Role:
    """Return what a node is for, by its name."""
    return Role.PREFILL if node.name.startswith("pe") else Role.DECODE


def _faster(costs: _Costs, speedup: float) -> _Costs:
    times = {
        name: getattr(costs, name) / speedup
        for name in costs.__struct_fields__
        if name.endswith("_s")
    }
    return msgspec.structs.replace(costs, **times)
