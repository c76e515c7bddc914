"""Simulated runs side by side: one summary per run, one column per mode, and what binds.

    summaries = [summarise(simulate(setup, agents)) for setup in setups]
    print_report(compare(summaries))

Use of resources is taken over the *busy part* of a run, until ``BUSY_SHARE`` of its rounds have
finished: afterwards a few long agents run on a nearly empty cluster, which shows no limits.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from dualpath.core.cluster import Role
from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.report.model import Notes, Report, SideBySide, Table
from dualpath_sim.simulator.derived import buffer_bytes, receives_in_hbm
from dualpath_sim.simulator.result import NS_PER_S, SimulationResult
from dualpath_sim.simulator.settings import ClusterSettings

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

BUSY_SHARE = 0.9
#: From this use on a resource counts as the bottleneck.
BINDING_USE = 0.8
#: The same for buffers and for the DEs' HBM, which are never full: a request takes room for all of
#: its KV or waits.
BINDING_MEMORY_USE = 0.7

STAGES = (
    ("scheduling", "submitted_ns", "assigned_ns"),
    ("buffer", "assigned_ns", "granted_ns"),
    ("reading", "granted_ns", "loaded_ns"),
    ("waiting for the PE", "loaded_ns", "prefill_ns"),
    ("prefill", "prefill_ns", "first_token_ns"),
    ("waiting for the DE", "first_token_ns", "decoding_ns"),
    ("decode", "decoding_ns", "finished_ns"),
)


class Spread(msgspec.Struct, frozen=True):
    """Mean and 99th percentile (linear interpolation) in seconds."""

    mean_s: float
    p99_s: float


class Use(msgspec.Struct, frozen=True, kw_only=True):
    """Shares (0 to 1) of capacity in the busy part, means over nodes or engines of the role.

    SNIC and CNIC by bytes; PE by the time in forward passes; DE by HBM held by decoding requests.
    Buffers by the slots of granted rounds: a DE's for the whole prompt until it is in HBM, a PE's
    for the part of the hit that PEs read, by their share of all bytes read, until the first token.
    If DEs receive prompts in HBM, requests hold it from their assignment on, and slots of DEs are
    for the part of the hit that DEs read.  Oracle has no buffers: None.

    A PE is nearly always in a pass, be it of one request, so ``prefill_wait_passes`` shows whether
    it is too slow: how long a round waits for it, in mean lengths of a pass.  About a half is the
    wait for the pass under way; from one on, rounds wait for whole passes of others.
    """

    snic_prefill: float
    snic_decode: float
    cnic: float
    prefill_engines: float
    prefill_wait_passes: float
    prefill_buffers: float | None
    decode_buffers: float | None
    decode_hbm: float


class RunSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One simulated run; times in virtual seconds.

    ``ttft``, ``ttst`` and ``tpot`` are None where no round has them.  ``stages_s`` are the mean
    seconds a finished round spent in each stage.  ``unfinished_rounds`` > 0 where the run was cut.
    """

    mode: Mode
    prefill_nodes: int
    decode_nodes: int
    model: str
    agents: int
    rounds: int
    unfinished_rounds: int
    jct_s: float
    agent_jct_s: float | None
    ttft: Spread | None
    ttst: Spread | None
    tpot: Spread | None
    prompt_tokens: int
    hit_tokens: int
    generated_tokens: int
    dram_tier_hit_tokens: int
    prefill_read_bytes: float
    decode_read_bytes: float
    use: Use
    stages_s: dict[str, float]
    binds: str
    simulated: Literal[True] = True


def summarise(result: SimulationResult) -> RunSummary:
    """Reduce a run to its figures."""
    agents, cluster = result.agents, result.setup.cluster
    read = result.links.snic_read_bytes.sum(axis=0)
    stages_s = _stages_s(result)
    used = _use(result, stages_s)
    done = result.turns.finished_ns >= 0
    agent_jct = result.agent_jct_s()
    agent_jct = agent_jct[~np.isnan(agent_jct)]
    return RunSummary(
        mode=result.setup.mode,
        prefill_nodes=cluster.prefill_nodes,
        decode_nodes=cluster.decode_nodes,
        model=result.setup.model.name,
        agents=agents.agents,
        rounds=agents.rounds,
        unfinished_rounds=int((~done).sum()),
        jct_s=result.jct_s,
        agent_jct_s=float(agent_jct.mean()) if agent_jct.size else None,
        ttft=_spread(result.ttft_s()),
        ttst=_spread(result.ttst_s()),
        tpot=_spread(result.tpot_s()),
        prompt_tokens=int(agents.prompt_tokens.sum(dtype=np.int64)),
        hit_tokens=int(agents.hit_tokens.sum(dtype=np.int64)),
        generated_tokens=int(agents.generated_tokens.sum(dtype=np.int64)),
        dram_tier_hit_tokens=result.dram_tier_hit_tokens,
        prefill_read_bytes=float(read[: cluster.prefill_nodes].sum()),
        decode_read_bytes=float(read[cluster.prefill_nodes :].sum()),
        use=used,
        stages_s=stages_s,
        binds=_binds(used, stages_s),
    )


def compare(summaries: Sequence[RunSummary], notes: Sequence[str] = ()) -> Report:
    """Return the report of one or more runs; raises ``ConfigError`` without any."""
    if not summaries:
        raise ConfigError("there is no run to compare; simulate at least one mode")
    busy = (
        f"All figures are simulated. Use is the mean until {BUSY_SHARE:.0%} of the rounds "
        f"were over; a resource binds if its use is {BINDING_USE:.0%} or more (a "
        f"memory: {BINDING_MEMORY_USE:.0%}); else the PEs bind if rounds wait for them longer than "
        "a pass."
    )
    return Report(
        name="simulation",
        title="dualpath simulate",
        blocks=(_table(summaries), Notes((busy, *notes))),
        warnings=tuple(
            f"{summary.mode}: {summary.unfinished_rounds} rounds unfinished"
            for summary in summaries
            if summary.unfinished_rounds
        ),
    )


def _table(summaries: Sequence[RunSummary]) -> Table:
    basic = next((s for s in summaries if s.mode is Mode.BASIC), None)
    oracle = next((s for s in summaries if s.mode is Mode.ORACLE), None)
    rows = SideBySide([summary.mode.value for summary in summaries], summaries)
    rows.add("time", "JCT, s", lambda s: s.jct_s, "{:,.1f}")
    rows.add("time", "speed-up over Basic", lambda s: _ratio(basic, s), "{:.2f}x")
    rows.add("time", "JCT relative to Oracle", lambda s: _ratio(s, oracle), "{:.2f}x")
    rows.add("time", "mean JCT of an agent, s", lambda s: s.agent_jct_s, "{:,.1f}")
    _add_latencies(rows, "TTFT", lambda s: s.ttft)
    _add_latencies(rows, "TTST", lambda s: s.ttst)
    _add_latencies(rows, "TPOT", lambda s: s.tpot)
    rows.add("hits", "hit tokens", lambda s: s.hit_tokens, "{:,}")
    rows.add("hits", "hit rate", lambda s: s.hit_tokens / s.prompt_tokens, "{:.1%}")
    rows.add("hits", "of them from the DRAM tier", lambda s: s.dram_tier_hit_tokens or None, "{:,}")
    rows.add("reads", "read at the PEs, TB", lambda s: s.prefill_read_bytes / 1e12, "{:,.3f}")
    rows.add("reads", "read at the DEs, TB", lambda s: s.decode_read_bytes / 1e12, "{:,.3f}")
    rows.add("use", "SNICs of the PEs", lambda s: s.use.snic_prefill, "{:.0%}")
    rows.add("use", "SNICs of the DEs", lambda s: s.use.snic_decode, "{:.0%}")
    rows.add("use", "CNICs", lambda s: s.use.cnic, "{:.0%}")
    rows.add("use", "PEs in forward passes", lambda s: s.use.prefill_engines, "{:.0%}")
    rows.add("use", "wait for a PE, passes", lambda s: s.use.prefill_wait_passes, "{:.1f}")
    rows.add("use", "buffers of the PEs", lambda s: s.use.prefill_buffers, "{:.0%}")
    rows.add("use", "buffers of the DEs", lambda s: s.use.decode_buffers, "{:.0%}")
    rows.add("use", "HBM of the DEs", lambda s: s.use.decode_hbm, "{:.0%}")
    rows.add("binds", "what binds", lambda s: s.binds)
    return rows.table()


def _add_latencies(
    rows: SideBySide[RunSummary], name: str, spread: Callable[[RunSummary], Spread | None]
) -> None:
    def milliseconds(part: str, summary: RunSummary) -> float | None:
        times = spread(summary)
        return None if times is None else getattr(times, part) * 1000

    rows.add(name, f"{name} mean, ms", partial(milliseconds, "mean_s"), "{:,.1f}")
    rows.add(name, f"{name} p99, ms", partial(milliseconds, "p99_s"), "{:,.1f}")


def _ratio(longer: RunSummary | None, shorter: RunSummary | None) -> float | None:
    if longer is None or shorter is None or not shorter.jct_s > 0:
        return None
    return longer.jct_s / shorter.jct_s


def _spread(times_s: FloatArray) -> Spread | None:
    known = times_s[~np.isnan(times_s)]
    if not known.size:
        return None
    return Spread(float(known.mean()), float(np.percentile(known, 99)))


def _use(result: SimulationResult, stages_s: dict[str, float]) -> Use:
    cluster, end_ns = result.setup.cluster, _busy_end_ns(result)
    links = result.links
    windows = max(end_ns // links.window_ns, 1)
    # A run shorter than a window is over before the window is.
    busy_s = min(windows * links.window_ns, max(result.end_ns, 1)) / NS_PER_S
    reads = links.snic_read_bytes[:windows].sum(axis=0) / busy_s
    p = cluster.prefill_nodes
    # A CNIC carries its rate in either direction.
    cnic_rate = 2 * cluster.cnic_bytes_per_s * cluster.gpus_per_node
    prefill_buffers, decode_buffers = _buffer_use(result, end_ns)
    return Use(
        snic_prefill=float(reads[:p].mean() / cluster.snic_bytes_per_s),
        snic_decode=float(reads[p:].mean() / cluster.snic_bytes_per_s),
        cnic=float(links.cnic_bytes[:windows].sum() / busy_s / cluster.nodes / cnic_rate),
        prefill_engines=_prefill_use(result, end_ns),
        prefill_wait_passes=_prefill_wait_passes(result, stages_s),
        prefill_buffers=prefill_buffers,
        decode_buffers=decode_buffers,
        decode_hbm=_decode_hbm_use(result, end_ns),
    )


def _busy_end_ns(result: SimulationResult) -> int:
    finished = np.sort(result.turns.finished_ns[result.turns.finished_ns >= 0])
    if not finished.size:
        return max(int(result.end_ns), 1)
    return max(int(finished[int((finished.size - 1) * BUSY_SHARE)]), 1)


def _prefill_use(result: SimulationResult, end_ns: int) -> float:
    batches = result.batches
    busy = np.minimum(batches.end_ns, end_ns) - np.minimum(batches.start_ns, end_ns)
    return float(busy.sum() / (prefill_units(result.setup.cluster) * end_ns))


def _prefill_wait_passes(result: SimulationResult, stages_s: dict[str, float]) -> float:
    """Return the wait for a PE in passes; waiting at the scheduler counts, for overload (β)."""
    if not stages_s or not result.batches.start_ns.size:
        return 0.0
    pass_s = float((result.batches.end_ns - result.batches.start_ns).mean()) / NS_PER_S
    waited_s = stages_s["scheduling"] + stages_s["waiting for the PE"]
    return waited_s / pass_s if pass_s > 0 else 0.0


def prefill_units(cluster: ClusterSettings) -> int:
    """Return how many prefill units step for themselves: groups with lock-step, else engines."""
    if not cluster.lockstep:
        return cluster.prefill_engines
    return -(-cluster.prefill_engines // cluster.group_engines(Role.PREFILL))


def _buffer_use(result: SimulationResult, end_ns: int) -> tuple[float | None, float | None]:
    """Return the use of the buffers of PEs and of DEs (``Use``), None for Oracle."""
    turns, agents, setup = result.turns, result.agents, result.setup
    if not setup.mode.moves_bytes:
        return None, None
    cluster, read = setup.cluster, result.links.snic_read_bytes.sum(axis=0)
    all_read = float(read.sum())
    pe_share = float(read[: cluster.prefill_nodes].sum()) / all_read if all_read else 0.0
    hit_tokens, prompt_tokens = (
        _whole_blocks(tokens, cluster.block_tokens)
        for tokens in (agents.hit_tokens, agents.prompt_tokens)
    )
    at_prefill, at_decode = buffer_bytes(setup)
    received = (1 - pe_share) * hit_tokens if receives_in_hbm(setup) else prompt_tokens
    used = []
    for tokens, until_ns, nodes, node_bytes in (
        (pe_share * hit_tokens, turns.first_token_ns, cluster.prefill_nodes, at_prefill),
        (received, turns.decoding_ns, cluster.decode_nodes, at_decode),
    ):
        token_ns = _held_token_ns(result, turns.granted_ns, until_ns, tokens, end_ns)
        room = nodes * node_bytes * end_ns
        used.append(token_ns * setup.model.kv_bytes_per_token / room if room else 0.0)
    return used[0], used[1]


def _whole_blocks(tokens: NDArray[np.int32], block_tokens: int) -> FloatArray:
    """Return the tokens of the blocks that hold these tokens."""
    return np.ceil(tokens / block_tokens) * block_tokens


def _decode_hbm_use(result: SimulationResult, end_ns: int) -> float:
    turns, agents, setup = result.turns, result.agents, result.setup
    tokens = agents.prompt_tokens.astype(np.float64) + agents.generated_tokens / 2
    from_ns = turns.assigned_ns if receives_in_hbm(setup) else turns.decoding_ns
    token_ns = _held_token_ns(result, from_ns, turns.finished_ns, tokens, end_ns)
    gpus = setup.cluster.decode_nodes * setup.cluster.gpus_per_node
    room = setup.cluster.decode_hbm_bytes * gpus / setup.model.decode_replicas
    return token_ns * setup.model.kv_bytes_per_token / (room * end_ns)


def _held_token_ns(
    result: SimulationResult,
    from_ns: IntArray,
    until_ns: IntArray,
    tokens: FloatArray,
    end_ns: int,
) -> float:
    """Return token-nanoseconds that rounds hold before ``end_ns``; times are -1 for never."""
    started = from_ns >= 0
    until = np.where(until_ns >= 0, until_ns, result.end_ns)
    held_ns = np.minimum(until, end_ns) - np.minimum(from_ns, end_ns)
    return float((held_ns * tokens)[started].sum())


def _stages_s(result: SimulationResult) -> dict[str, float]:
    done = result.turns.finished_ns >= 0
    if not done.any():
        return {}
    return {
        name: float(
            (getattr(result.turns, end)[done] - getattr(result.turns, start)[done]).mean()
            / NS_PER_S
        )
        for name, start, end in STAGES
    }


def _binds(use: Use, stages_s: dict[str, float]) -> str:
    """Name the most used link or memory, else PEs, else where rounds spend their time.

    PEs come last: rounds wait at the scheduler for whatever binds, not only for PEs.
    """
    shares = {
        "SNICs of the PEs": use.snic_prefill / BINDING_USE,
        "SNICs of the DEs": use.snic_decode / BINDING_USE,
        "CNICs": use.cnic / BINDING_USE,
        "buffers of the PEs": (use.prefill_buffers or 0.0) / BINDING_MEMORY_USE,
        "buffers of the DEs": (use.decode_buffers or 0.0) / BINDING_MEMORY_USE,
        "HBM of the DEs": use.decode_hbm / BINDING_MEMORY_USE,
    }
    name = max(shares, key=lambda key: shares[key])
    if shares[name] >= 1:
        return name
    if use.prefill_engines >= BINDING_USE and use.prefill_wait_passes >= 1:
        return "PEs"
    if not stages_s:
        return "nothing finished"
    stage = max(stages_s, key=lambda key: stages_s[key])
    total_s = sum(stages_s.values())
    return f"latency: {stage} {stages_s[stage] / total_s:.0%}" if total_s > 0 else "nothing"
