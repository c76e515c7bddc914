"""What a model asks of a cluster's engines: HBM, buffers and NICs of each GPU.

Nothing here is simulated.  Bytes of a prompt are those of its transfer plan, read on either side in
the proportion of the nodes, and of its GPUs' slices (``plan.movements.Replicas``).
"""

from collections import Counter

import msgspec

from dualpath.core.blocks import BlockGeometry
from dualpath.core.cluster import Role
from dualpath.core.runs import BlockRun, HitRun
from dualpath.plan.bounds import ONE_HOLDER, link_bytes
from dualpath.plan.movements import Link, Replicas
from dualpath.plan.steps import PromptLayout, whole_plan
from dualpath.policy.events import TYPICAL_APPEND_TOKENS, TYPICAL_CONTEXT_TOKENS
from dualpath_sim.catalog.costs import hbm_for_kv_bytes, sharing
from dualpath_sim.catalog.geometry import ModelGeometry
from dualpath_sim.catalog.gpu import GpuRates
from dualpath_sim.simulator.settings import ClusterSettings


class ModelSizes(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that a model's KV takes, whatever the cluster.

    ``pass_bytes`` of the longest prompt are in a PE's HBM at a time; of it ``read_bytes`` come from
    storage, and ``pe_cnic_bytes`` go through the NICs of its PE in their busier direction if the PE
    reads.  ``agent_bytes`` stay in storage of an agent that is done.
    """

    weight_bytes: float
    kv_bytes_per_token: float
    full_block_bytes: int
    prompt_bytes: int
    pass_bytes: int
    read_bytes: int
    pe_cnic_bytes: int
    agent_bytes: float


def model_sizes(
    model: ModelGeometry,
    *,
    prompt_tokens: int,
    total_tokens: float,
    block_tokens: int,
    layer_buffers: int,
) -> ModelSizes:
    """Return the sizes of a longest prompt and an agent, both in tokens.

    All of the prompt but a typical append (429 tokens, Table 2) is read, at least one token of it
    is not.  ``layer_buffers`` ≥ 1 layers of each size are in a PE's HBM (§2.1).
    """
    geometry = model.block_geometry(block_tokens)
    blocks = -(-prompt_tokens // block_tokens)
    layers = Counter(sum(parts) for parts in geometry.layer_parts)
    held_bytes = sum(size * min(layer_buffers, count) for size, count in layers.items())
    misses = min(TYPICAL_APPEND_TOKENS, prompt_tokens - 1)
    links = _read_at(Role.PREFILL, model.block_geometry(1), prompt_tokens - misses, misses)
    return ModelSizes(
        weight_bytes=model.weight_bytes,
        kv_bytes_per_token=model.kv_bytes_per_token_all_layers,
        full_block_bytes=geometry.full_block_bytes,
        prompt_bytes=blocks * geometry.full_block_bytes,
        pass_bytes=blocks * held_bytes,
        read_bytes=links[Link.PE_SNIC_READ],
        pe_cnic_bytes=max(links[Link.PE_CNIC_READ], links[Link.PE_CNIC_WRITE]),
        agent_bytes=total_tokens * model.kv_bytes_per_token_all_layers,
    )


class RoleNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """A role's engines: GPUs of an engine, engines of a group, and what one GPU has to do.

    ``left_hbm_bytes`` remain beside the weights, negative where they do not fit;
    ``set_hbm_bytes`` is the cluster's setting.  ``hbm_tokens`` of KV fit an engine's GPUs together.
    Of the buffer
    ``buffer_bytes`` fall to one GPU, and a node's holds ``buffer_prompts`` of the longest prompts.
    ``cnic_*_bytes`` go through one GPU's NIC for a typical prompt.
    """

    role: Role
    gpus_per_engine: int
    group_engines: int
    expert_gpus: int
    replicas: float
    weight_bytes: float
    left_hbm_bytes: float
    set_hbm_bytes: float
    hbm_tokens: int
    buffer_bytes: float
    buffer_prompts: float | None
    cnic_read_bytes: float
    cnic_write_bytes: float


def replicas_of(cluster: ClusterSettings, model: ModelGeometry | None) -> Replicas:
    """Return how many of an engine's GPUs hold the same KV; of no model, that none do.

    Raises ``ConfigError`` for heads that cannot be divided among an engine's GPUs.
    """
    if model is None:
        return Replicas()
    found = {}
    for role in Role:
        gpus = cluster.gpus_per_engine(role)
        model.check_gpus_per_engine(gpus)
        found[role] = model.replicas(gpus)
    return Replicas(found[Role.PREFILL], found[Role.DECODE], cluster.share_loads)


def role_needs(
    cluster: ClusterSettings, model: ModelGeometry, gpu: GpuRates
) -> tuple[RoleNeeds, RoleNeeds]:
    """Return what a prefill and what a decode engine need; raises as ``replicas_of``."""
    replicas = replicas_of(cluster, model)
    carried = _prompt_bytes(cluster, model, replicas)
    prefill = _needs(cluster, model, gpu, Role.PREFILL, replicas.prefill, carried)
    return prefill, _needs(cluster, model, gpu, Role.DECODE, replicas.decode, carried)


def _needs(
    cluster: ClusterSettings,
    model: ModelGeometry,
    gpu: GpuRates,
    role: Role,
    replicas: float,
    carried: dict[Link, float],
) -> RoleNeeds:
    shared, prefill = sharing(cluster, role), role is Role.PREFILL
    hbm = cluster.prefill_hbm_bytes if prefill else cluster.decode_hbm_bytes
    buffer = cluster.prefill_buffer_bytes if prefill else cluster.decode_buffer_bytes
    read, write = (
        (Link.PE_CNIC_READ, Link.PE_CNIC_WRITE)
        if prefill
        else (Link.DE_CNIC_READ, Link.DE_CNIC_WRITE)
    )
    per_token, longest = model.kv_bytes_per_token_all_layers, model.context_limit_tokens
    return RoleNeeds(
        role=role,
        gpus_per_engine=shared.engine,
        group_engines=cluster.group_engines(role),
        expert_gpus=shared.experts if model.expert_layers else 0,
        replicas=replicas,
        weight_bytes=model.weight_bytes_per_gpu(shared.experts, shared.engine),
        left_hbm_bytes=hbm_for_kv_bytes(model, gpu, shared),
        set_hbm_bytes=hbm,
        hbm_tokens=int(hbm * shared.engine / replicas / per_token),
        buffer_bytes=buffer / cluster.gpus_per_node,
        buffer_prompts=buffer / (longest * per_token) if longest else None,
        cnic_read_bytes=carried[read] / shared.engine,
        cnic_write_bytes=carried[write] / shared.engine,
    )


def _prompt_bytes(
    cluster: ClusterSettings, model: ModelGeometry, replicas: Replicas
) -> dict[Link, float]:
    """Return what a typical prompt puts on every link, over all GPUs of its PE and its DE."""
    hits, misses = TYPICAL_CONTEXT_TOKENS, TYPICAL_APPEND_TOKENS
    geometry = model.block_geometry(1)
    total: dict[Link, float] = {}
    for role in Role:
        share = cluster.nodes_of(role) / cluster.nodes
        for link, amount in _read_at(role, geometry, hits, misses, replicas).items():
            total[link] = total.get(link, 0.0) + share * amount
    return total


def _read_at(
    role: Role, geometry: BlockGeometry, hits: int, misses: int, replicas: Replicas = ONE_HOLDER
) -> Counter[Link]:
    """Return what a prompt puts on every link; blocks of a token, so that none is cut."""
    run = HitRun(role, BlockRun(0, hits)).whole_behind(geometry.whole_from(hits))
    layout = PromptLayout(geometry=geometry, prompt_tokens=hits + misses, hits=(run,))
    return link_bytes(whole_plan(layout), replicas)
