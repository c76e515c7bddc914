"""What both cores derive from a setup before a run: limits, engines and groups, checks."""

from typing import Any, NamedTuple

import numpy as np

from dualpath.core.blocks import holding_blocks
from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError, TraceError
from dualpath.core.modes import Handover, Mode
from dualpath.core.rates import RecomputeWeight, fitted_recompute_weight
from dualpath.plan import movements
from dualpath.policy.batching import NO_LOAD_BOUND, UNBOUNDED_TOKENS, LoadBound, chunk_flops
from dualpath.policy.events import TYPICAL_CONTEXT_TOKENS, EngineSpec, SchedulerSettings
from dualpath.workload.columns.agent_table import AgentTable
from dualpath_sim.simulator import rules
from dualpath_sim.simulator.settings import ClusterSettings, ModelCosts, Setup

#: A compute quota that never binds, for modes without one.
NO_QUOTA_S = 1e30


class Limits(NamedTuple):
    """Limits of a run in tokens and bytes.

    ``prefill_hbm_tokens`` is the KV a forward pass of one engine may touch: all layers of it
    without layerwise prefill, ``layer_buffers`` layers with it.
    """

    alpha_tokens: int
    beta_tokens: int
    prefill_hbm_tokens: int
    decode_hbm_tokens: int
    batch_cap_tokens: int
    compute_quota_s: float
    block_bytes: float
    read_tokens_per_s: float


def limits(setup: Setup) -> Limits:
    """Return the limits of a run."""
    cluster, model = setup.cluster, setup.model
    per_token = model.kv_bytes_per_token
    held_per_token = per_token
    # A rank's HBM holds its slice of every token: so many ranks hold a token's KV together.
    at_prefill = cluster.prefill_tp / model.prefill_replicas
    at_decode = cluster.decode_tp / model.decode_replicas
    if setup.mode.layerwise:
        held_per_token = per_token / model.layers * min(cluster.layer_buffers, model.layers)
    beta = cluster.beta_tokens or max(int(cluster.beta_s * model.prefill_tokens_per_s), 1)
    quota = setup.mode.compute_quota
    return Limits(
        alpha_tokens=int(cluster.alpha_s * cluster.snic_bytes_per_s / per_token),
        beta_tokens=beta,
        prefill_hbm_tokens=int(cluster.prefill_hbm_bytes * at_prefill / held_per_token),
        decode_hbm_tokens=int(cluster.decode_hbm_bytes * at_decode / per_token),
        batch_cap_tokens=1 << 40 if quota else cluster.batch_cap_tokens,
        compute_quota_s=cluster.compute_quota_s if quota else NO_QUOTA_S,
        block_bytes=per_token * cluster.block_tokens,
        read_tokens_per_s=cluster.snic_bytes_per_s / per_token,
    )


def layer_kinds(setup: Setup) -> list[list[float]]:
    """Return windows and bytes of a block by kind of layers (``rules.LayerKinds``)."""
    model, block_tokens = setup.model, setup.cluster.block_tokens
    by_window = sorted((run.window_tokens, run.kv_bytes_per_token) for run in model.window_layers)
    unwindowed = model.kv_bytes_per_token - sum(per_token for _, per_token in by_window)
    kinds = [(0, unwindowed), *by_window]
    return [[float(window), per_token * block_tokens] for window, per_token in kinds]


def buffer_bytes(setup: Setup) -> tuple[float, float]:
    """Return the buffer of a prefill node and of a decode node, the DRAM tier's share included."""
    cluster = setup.cluster
    more = cluster.dram_tier_bytes or 0.0
    baseline = setup.mode in (Mode.BASIC, Mode.LAYERWISE)
    if baseline and cluster.baseline_buffer_bytes is not None:
        return cluster.baseline_buffer_bytes + more, cluster.baseline_buffer_bytes + more
    return cluster.prefill_buffer_bytes + more, cluster.decode_buffer_bytes + more


def has_dram_tier(setup: Setup) -> bool:
    """Return whether buffers cache KV in their unused part; Oracle has none."""
    return setup.cluster.dram_tier_bytes is not None and setup.mode.moves_bytes


#: Movements (``plan.movements``) that the machine is charged with, and their places in this order.
#: Hits and misses of a chunk leave its PE as one transfer, since both load the same links.
#: ``STAGE_GENERATED`` is charged for prompts that DEs receive in HBM.  Generated blocks are copied
#: now and then while a DE decodes, which is not modelled.
CHARGED = (
    movements.READ_TO_PE,
    movements.READ_TO_DE,
    movements.LOAD_FROM_PE_BUFFER,
    movements.LOAD_FROM_DE_BUFFER,
    movements.RELOAD_CHUNK,
    movements.SEND_MISSES,
    movements.FILL_DE_HBM,
    movements.PERSIST_PROMPT,
    movements.PERSIST_GENERATED,
    movements.SEND_MISSES_TO_HBM,
    movements.RELOAD_CHUNK_FROM_HBM,
    movements.STAGE_GENERATED,
)
(
    READ_PE_PATH,
    READ_DE_PATH,
    LOAD_PE_PATH,
    LOAD_DE_PATH,
    RELOAD_PATH,
    SEND_PATH,
    FILL_PATH,
    PERSIST_PROMPT_PATH,
    PERSIST_GENERATED_PATH,
    SEND_TO_HBM_PATH,
    RELOAD_FROM_HBM_PATH,
    STAGE_PATH,
) = range(len(CHARGED))


def receives_in_hbm(setup: Setup) -> bool:
    """Return whether DEs may receive prompts in HBM."""
    by_mode = setup.mode in (Mode.DUALPATH, Mode.SPLIT)
    return by_mode and scheduler_settings(setup, limits(setup)).handover is not Handover.BUFFER


def load_bound(setup: Setup) -> LoadBound:
    """Return the bound of what a pass of a PE loads over its compute NIC."""
    cluster, model = setup.cluster, setup.model
    if not receives_in_hbm(setup):
        return NO_LOAD_BOUND
    loaded_bytes = model.kv_bytes_per_token * setup.replicas.prefill_loads
    return LoadBound(
        load_token_s=loaded_bytes / (cluster.cnic_bytes_per_s * cluster.prefill_tp),
        batch_s=model.prefill.batch_s,
        token_s=model.prefill.feed_forward_token_s,
    )


def copies(setup: Setup) -> tuple[float, ...]:
    """Return how often the links carry the bytes of each kind of step, by ``CHARGED``."""
    return tuple(float(movement.copies(setup.replicas)) for movement in CHARGED)


def check(setup: Setup, agents: AgentTable) -> None:
    """Raise ``ConfigError`` or ``TraceError`` for a run that cannot be, before it starts."""
    agents.check()
    longest = (agents.prompt_tokens.astype(np.int64) + agents.generated_tokens).max()
    bound = setup.model.context_limit_tokens
    if bound is not None and longest > bound:
        raise TraceError(
            f"the longest round has {longest} tokens with its generation, model "
            f"{setup.model.name} takes {bound}; truncate the "
            "trace ({max_context_tokens}) or use another model"
        )
    _check_memories(setup, agents)


def _check_memories(setup: Setup, agents: AgentTable) -> None:
    cluster, derived = setup.cluster, limits(setup)
    prompt = int(agents.prompt_tokens.max())
    reserve = np.minimum(agents.generated_tokens, cluster.generated_reserve_tokens)
    at_decode = int((agents.prompt_tokens.astype(np.int64) + reserve).max())
    blocks_bytes = holding_blocks(prompt, cluster.block_tokens) * derived.block_bytes
    _require_room("decode_hbm_bytes", at_decode, derived.decode_hbm_tokens, "KV tokens")
    _require_room("prefill_hbm_bytes", prompt, derived.prefill_hbm_tokens, "KV tokens")
    if setup.mode is Mode.ORACLE:
        return
    at_prefill, at_decode_node = buffer_bytes(setup)
    _require_room("decode_buffer_bytes", blocks_bytes, at_decode_node, "bytes")
    _require_room("prefill_buffer_bytes", blocks_bytes, at_prefill, "bytes")


def _require_room(name: str, need: float, have: float, unit: str) -> None:
    if need > have:
        raise ConfigError(
            f"the largest round needs {need:.6g} {unit}, {{{name}}} holds {have:.6g}; "
            f"raise {{{name}}} or truncate the trace"
        )


class Group(NamedTuple):
    """Engines that fetch together (§6.1)."""

    name: str
    role: Role
    engines: range


class ClusterLayout(NamedTuple):
    """Groups in the order in which they fetch, and units of each role in order of engine."""

    groups: tuple[Group, ...]
    prefill_units: tuple[range, ...]
    decode_units: tuple[range, ...]


def cluster_layout(cluster: ClusterSettings) -> ClusterLayout:
    """Return the layout of a cluster."""
    prefill = _runs(0, cluster.prefill_engines, cluster.group_engines(Role.PREFILL))
    decode = _runs(cluster.prefill_engines, cluster.engines, cluster.group_engines(Role.DECODE))
    groups = [Group(f"P{i}", Role.PREFILL, engines) for i, engines in enumerate(prefill)]
    groups += [Group(f"D{i}", Role.DECODE, engines) for i, engines in enumerate(decode)]
    if cluster.lockstep:
        return ClusterLayout(tuple(groups), tuple(prefill), tuple(decode))
    return ClusterLayout(
        groups=tuple(groups),
        prefill_units=tuple(range(e, e + 1) for e in range(cluster.prefill_engines)),
        decode_units=tuple(
            range(e, e + 1) for e in range(cluster.prefill_engines, cluster.engines)
        ),
    )


def node_of(cluster: ClusterSettings, engine: int) -> int:
    """Return the node of an engine."""
    return rules.node_of(
        engine,
        cluster.prefill_engines,
        cluster.prefill_nodes,
        cluster.node_engines(Role.PREFILL),
        cluster.node_engines(Role.DECODE),
    )


def _runs(first: int, end: int, group: int) -> list[range]:
    return [range(engine, min(engine + group, end)) for engine in range(first, end, group)]


def scheduler_settings(setup: Setup, limits: Limits) -> SchedulerSettings:
    """Return the scheduler's settings: those of the cluster with the same name, and what follows.

    A new rule's setting is a field of ``ClusterSettings``.  With window layers no DE computes an
    append or receives a prompt in HBM: blocks that have left a window could not be stored whole.
    Nor does a third DE serve hits, whose runs would each have windows of their own.
    """
    cluster = setup.cluster
    names = [name for name in SchedulerSettings.__struct_fields__ if hasattr(cluster, name)]
    derived: dict[str, Any] = {
        "mode": setup.mode,
        "alpha_tokens": limits.alpha_tokens,
        "beta_tokens": limits.beta_tokens,
        "computed_weight": setup.model.computed_weight,
        "recompute_weight": recompute_weight(setup.model),
    }
    if setup.model.window_layers:
        derived |= {
            "append_at_decode_tokens": 0,
            "handover": Handover.BUFFER,
            "third_engine_reads": 0,
        }
    return SchedulerSettings(**{name: getattr(cluster, name) for name in names} | derived)


def recompute_weight(model: ModelCosts) -> RecomputeWeight:
    """Return how many prompt tokens a PE gets done while it recomputes a token, by its position.

    What a pass takes besides its tokens is left out: a long recomputation has full passes.
    """
    prefill = model.prefill
    compute_s = prefill.attention_token_s + prefill.feed_forward_token_s
    exchange_s = prefill.exchange_token_s
    token_s = max(compute_s, exchange_s) if prefill.interleaved else compute_s + exchange_s
    costs = (prefill.pair_s, prefill.index_pair_s, token_s)
    window = prefill.window_tokens or UNBOUNDED_TOKENS

    def seconds(cached: int, count: int) -> float:
        return chunk_flops(*costs, window, cached, count)

    context = min(TYPICAL_CONTEXT_TOKENS, model.context_limit_tokens or TYPICAL_CONTEXT_TOKENS)
    return fitted_recompute_weight(seconds, context, model.prefill_tokens_per_s)


def engine_specs(setup: Setup, limits: Limits, layout: ClusterLayout) -> list[EngineSpec]:
    """Return all engines, PEs first, in order of number; an engine's id is its number."""
    cluster = setup.cluster
    return [
        EngineSpec(
            engine_id=str(engine),
            role=group.role,
            node=str(node_of(cluster, engine)),
            group=group.name,
            order=engine,
            hbm_tokens=limits.decode_hbm_tokens,
            snic_tokens_per_s=limits.read_tokens_per_s,
            lockstep=cluster.lockstep and len(group.engines) > 1,
        )
        for group in layout.groups
        for engine in group.engines
    ]
