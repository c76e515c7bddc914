"""What KV in unused buffers saves: JCT beside Oracle's, by how much of the working set fits."""

from typing import NamedTuple

import msgspec

from dualpath.core.modes import Mode
from dualpath.report.model import Table
from dualpath_sim.evaluation.report import FigureReport, exact, quantity
from dualpath_sim.evaluation.runs import OfflineRun, Runs
from dualpath_sim.evaluation.settings import DS_27B, DS_660B, QWEN_32B, RunSpec

TITLE = "DRAM as a tier"
DISCUSSION = """\
Without tool delays an agent sends its next turn at once, so that the unused part of the buffers
alone holds much of what is hit. With DS 660B the PEs are the bottleneck, and storage reads are
hidden behind them already.

**Where everything fits and Oracle is not reached, compute NICs are the bottleneck**: twice as
fast, they bring the same runs close to Oracle (last column but one). A block cached at a DE goes
over the DE's CNICs twice as a read and once as a write (to the PE, layer by layer, then from the
buffer to HBM); a block that the PE read from storage once as a read and twice as a write. So on DS
27B 1P1D, where a tenth of the hits is read, a quarter of the working set is better than all of it.
"""
#: DRAM beyond the buffers, all decode nodes together, as a share of the working set.
SHARES = (0.0, 0.25, 1.0)
#: Of CNICs, to see whether they bind.
FASTER = 2.0


class TierCase(msgspec.Struct, frozen=True):
    """JCT of one setting, and of a tier the share of hit tokens that came from DRAM.

    ``tiers_s`` and ``hit_shares`` are in the order of ``SHARES``; ``fast_cnics_s`` is with the
    largest of them and CNICs that are ``FASTER`` times as fast.
    """

    case: str
    working_set_bytes: float
    without_s: float
    tiers_s: tuple[float, ...]
    hit_shares: tuple[float, ...]
    fast_cnics_s: float
    oracle_s: float


class _Setting(NamedTuple):
    title: str
    spec: RunSpec


def build(runs: Runs) -> FigureReport:
    """Run every setting without a tier, with each size of one, and in Oracle."""
    cases = [_case(runs, setting) for setting in _settings(runs)]
    return FigureReport(
        name="dram-tier",
        title=TITLE,
        evaluation=runs.settings,
        settings=(
            "Offline: DualPath, all agents at once, no tool delays.",
            "A tier's size is DRAM beyond the buffers of a node, such that all decode nodes have "
            "that share of the working set: the KV of all agents after their last turn. Prefill "
            "nodes have as much each. Buffers are the paper's 80 GB per node; their unused part "
            "belongs to the tier, also where it is called 0.",
        ),
        tables=(_times(cases), _hits(cases)),
        panels=(),
        results=exact(
            {
                f"{one.case}: {what}": seconds
                for one in cases
                for what, seconds in (
                    ("JCT without a tier, s", one.without_s),
                    *(
                        (f"JCT, {share:.0%}, s", s)
                        for share, s in zip(SHARES, one.tiers_s, strict=True)
                    ),
                    ("Oracle, s", one.oracle_s),
                )
            }
        ),
        discussion=DISCUSSION,
    )


def _settings(runs: Runs) -> list[_Setting]:
    agents = runs.settings.offline_agents[0]
    spec = RunSpec(system=DS_660B, mode=Mode.DUALPATH, agents=agents)
    replace = msgspec.structs.replace
    return [
        *(
            _Setting(f"DS 660B 2P4D, {length}, {agents:,}", replace(spec, workload=length))
            for length in runs.settings.lengths
        ),
        *(
            _Setting(
                f"DS 27B {prefill}P{decode}D, 64K, {agents:,}",
                replace(spec, system=DS_27B, nodes=(prefill, decode)),
            )
            for prefill, decode in ((1, 1), (1, 2))
        ),
        _Setting(f"Qwen 32B 1P2D, 64K, {agents:,}", replace(spec, system=QWEN_32B)),
    ]


def _case(runs: Runs, setting: _Setting) -> TierCase:
    spec, agents, setup = setting.spec, runs.agents(setting.spec), runs.setup(setting.spec)
    last = agents.first_round[1:] - 1
    context = agents.prompt_tokens[last].astype(float) + agents.generated_tokens[last]
    working_set = float(context.sum()) * setup.model.kv_bytes_per_token
    replace = msgspec.structs.replace
    cluster = setup.cluster

    def with_tier(share: float, cnic_factor: float = 1.0) -> OfflineRun:
        overrides = (
            ("dram_tier_bytes", share * working_set / cluster.decode_nodes),
            ("cnic_bytes_per_s", cnic_factor * cluster.cnic_bytes_per_s),
        )
        return runs.offline(replace(spec, overrides=(*spec.overrides, *overrides)))

    tiers = [with_tier(share) for share in SHARES]
    return TierCase(
        case=setting.title,
        working_set_bytes=working_set,
        without_s=runs.offline(spec).jct_s,
        tiers_s=tuple(tier.jct_s for tier in tiers),
        hit_shares=tuple(tier.dram_tier_hit_share for tier in tiers),
        fast_cnics_s=with_tier(SHARES[-1], FASTER).jct_s,
        oracle_s=runs.offline(replace(spec, mode=Mode.ORACLE)).jct_s,
    )


def _times(cases: list[TierCase]) -> Table:
    fast = f"{SHARES[-1]:.0%}, CNICs x {FASTER:g}"
    columns = ("setting", "working set", "no tier", *map("{:.0%}".format, SHARES), fast, "Oracle")
    rows = [
        (
            one.case,
            quantity(one.working_set_bytes / 1e9, "GB"),
            *(
                f"{seconds / one.oracle_s:.2f}"
                for seconds in (one.without_s, *one.tiers_s, one.fast_cnics_s)
            ),
            quantity(one.oracle_s, "s"),
        )
        for one in cases
    ]
    return Table("JCT relative to Oracle's", columns, tuple(rows))


def _hits(cases: list[TierCase]) -> Table:
    columns = ("setting", *map("{:.0%}".format, SHARES))
    rows = [(one.case, *(f"{share:.1%}" for share in one.hit_shares)) for one in cases]
    return Table("Hit tokens that came from DRAM", columns, tuple(rows))
