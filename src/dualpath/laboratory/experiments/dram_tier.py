"""KV cached in DRAM on shaped links: with and without a DRAM tier, by the share that fits."""

from collections.abc import Callable

import msgspec

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.dram_tier_report import ORACLE, Share, TierJob, tier_report
from dualpath.laboratory.experiments.emulated_nodes import EmulatedEngines
from dualpath.laboratory.experiments.in_turns import Variant, run_interleaved
from dualpath.laboratory.experiments.jct import agents_of, lab_run_of
from dualpath.laboratory.experiments.report import ExperimentReport
from dualpath.laboratory.experiments.settings import EmulatedNodes
from dualpath.laboratory.experiments.tier_settings import TierSettings
from dualpath.laboratory.experiments.workload import windows, working_set_tokens
from dualpath.laboratory.workload.replay.options import ReplayOptions


def measure_dram_tier(
    settings: TierSettings, command: str, progress: Callable[[str], None] = lambda text: None
) -> ExperimentReport:
    """Run every share of the working set without and with a DRAM tier, and Oracle.

    Raises as ``measure_jct``.
    """
    jct = settings.jct
    lab = jct.lab_of(jct.nodes[0])
    agents = windows(agents_of(jct, lab))
    working_set_bytes = working_set_tokens(agents) * jct.emulated.kv_bytes_per_token
    shares = [
        Share(share, int(share * working_set_bytes / lab.decode)) for share in settings.shares
    ]
    variants = [
        Variant(share.name(tier=tier), jct.mode[0], _engines(jct.emulated, share, tier=tier))
        for share in shares
        for tier in (False, True)
    ]
    variants.append(Variant(ORACLE, Mode.ORACLE, EmulatedEngines(jct.emulated)))
    options = ReplayOptions(
        seed=jct.seed, tool_delays=settings.tool_delays, session_hints=settings.session_hints
    )
    with lab_run_of(jct, lab, agents, progress) as lab_run:
        runs = run_interleaved(lab_run, variants, jct.repeat, options, progress)
        job = TierJob(
            settings=settings,
            lab=lab_run.state.settings,
            links=lab_run.links,
            working_set_bytes=working_set_bytes,
            agents=len(agents),
            shares=shares,
            runs=runs,
        )
    return tier_report(job, command)


def _engines(nodes: EmulatedNodes, share: Share, *, tier: bool) -> EmulatedEngines:
    made = msgspec.structs.replace(nodes, dram_bytes=share.dram_bytes, dram_tier=tier)
    return EmulatedEngines(made)
