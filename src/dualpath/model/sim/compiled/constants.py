"""What does not change during a run of the compiled core: the setup's numbers, the rounds."""

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import Role
from dualpath.core.modes import Mode
from dualpath.laboratory.workload.columns.agent_table import AgentTable
from dualpath.model.sim.derived import keeps, layer_kinds, limits
from dualpath.model.sim.result import FloatArray, IntArray
from dualpath.model.sim.rules import to_ns
from dualpath.model.sim.settings import Setup
from dualpath.policy.batching import UNBOUNDED_TOKENS

Number = TypeVar("Number", np.int32, np.int64, np.float32)


class Constants(NamedTuple):
    """Numbers of a setup that do not change during a run; ``layer_kinds`` as ``sim.carried``."""

    cluster_nodes: int
    prefill_nodes: int
    prefill_engines: int
    prefill_node_engines: int
    decode_node_engines: int
    block_tokens: int
    block_bytes: float
    layer_kinds: FloatArray
    layers: int
    oracle: bool
    resident: bool
    overlap_passes: bool
    equal_snic: bool
    overhead_ns: int
    interval_ns: int
    latency_ns: int
    admission_ns: int
    window_ns: int
    snic_bytes_per_s: float
    snic_write_bytes_per_s: float
    prefill_cnic_bytes_per_s: float
    decode_cnic_bytes_per_s: float
    dram_bytes_per_s: float
    batch_cap_tokens: int
    prefill_hbm_tokens: int
    affordable_s: float
    keeps: bool
    pair_s: float
    index_pair_s: float
    attention_token_s: float
    window_tokens: int
    attention_batch_s: float
    batch_s: float
    feed_forward_token_s: float
    exchange_token_s: float
    interleaved: bool
    step_s: float
    request_s: float
    decode_pair_s: float
    decode_index_pair_s: float
    decode_window_tokens: int


class Rounds(NamedTuple):
    """Columns of the agent table; ``waiting_for`` are sub-agents' rounds to wait for, sorted."""

    first_round: IntArray
    prompt: NDArray[np.int32]
    hit: NDArray[np.int32]
    generated: NDArray[np.int32]
    delay_s: NDArray[np.float32]
    start_ns: IntArray
    waiting_for: IntArray
    waiting_agent: IntArray


def constants(setup: Setup, window_ns: int) -> Constants:
    """Return the numbers of a setup."""
    cluster, derived = setup.cluster, limits(setup)
    prefill, decode = setup.model.prefill, setup.model.decode
    return Constants(
        cluster_nodes=cluster.nodes,
        prefill_nodes=cluster.prefill_nodes,
        prefill_engines=cluster.prefill_engines,
        prefill_node_engines=cluster.node_engines(Role.PREFILL),
        decode_node_engines=cluster.node_engines(Role.DECODE),
        block_tokens=cluster.block_tokens,
        block_bytes=derived.block_bytes,
        layer_kinds=np.array(layer_kinds(setup)),
        layers=setup.model.layers,
        oracle=setup.mode is Mode.ORACLE,
        resident=not setup.mode.layerwise,
        overlap_passes=cluster.overlap_passes,
        equal_snic=cluster.snic_sharing == "equal",
        overhead_ns=to_ns(cluster.request_overhead_s),
        interval_ns=to_ns(cluster.fetch_interval_s),
        latency_ns=to_ns(cluster.read_latency_s),
        admission_ns=to_ns(cluster.decode_admission_s),
        window_ns=window_ns,
        snic_bytes_per_s=cluster.snic_bytes_per_s,
        snic_write_bytes_per_s=cluster.snic_write_bytes_per_s,
        prefill_cnic_bytes_per_s=cluster.cnic_bytes_per_s * cluster.gpus_per_engine(Role.PREFILL),
        decode_cnic_bytes_per_s=cluster.cnic_bytes_per_s * cluster.gpus_per_engine(Role.DECODE),
        dram_bytes_per_s=cluster.dram_bytes_per_s,
        batch_cap_tokens=derived.batch_cap_tokens,
        prefill_hbm_tokens=derived.prefill_hbm_tokens,
        # As ComputeQuota: one FLOP is one second here.
        affordable_s=(derived.compute_quota_s - prefill.attention_batch_s) * 1.0,
        keeps=keeps(setup),
        pair_s=prefill.pair_s,
        index_pair_s=prefill.index_pair_s,
        attention_token_s=prefill.attention_token_s,
        window_tokens=prefill.window_tokens or UNBOUNDED_TOKENS,
        attention_batch_s=prefill.attention_batch_s,
        batch_s=prefill.batch_s,
        feed_forward_token_s=prefill.feed_forward_token_s,
        exchange_token_s=prefill.exchange_token_s,
        interleaved=prefill.interleaved,
        step_s=decode.step_s,
        request_s=decode.request_s,
        decode_pair_s=decode.pair_s,
        decode_index_pair_s=decode.index_pair_s,
        decode_window_tokens=decode.window_tokens,
    )


def rounds(agents: AgentTable) -> Rounds:
    """Return the agents' columns, copied only where numba would take them for another type."""
    waiting = np.flatnonzero(agents.start_after_round >= 0)
    order = np.argsort(agents.start_after_round[waiting], kind="stable")
    return Rounds(
        first_round=_column(agents.first_round, np.int64),
        prompt=_column(agents.prompt_tokens, np.int32),
        hit=_column(agents.hit_tokens, np.int32),
        generated=_column(agents.generated_tokens, np.int32),
        delay_s=_column(agents.delay_s, np.float32),
        start_ns=whole_ns(agents.start_s),
        waiting_for=_column(agents.start_after_round[waiting][order], np.int64),
        waiting_agent=waiting[order],
    )


def whole_ns(seconds: NDArray[np.floating]) -> IntArray:
    """Round as ``rules.to_ns`` does."""
    return (seconds.astype(np.float64) * 1e9 + 0.5).astype(np.int64)


def _column(values: NDArray[Number], dtype: type[Number]) -> NDArray[Number]:
    return np.require(values, dtype, ["C", "A", "W"])
