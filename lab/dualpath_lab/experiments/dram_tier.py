"""KV cached in DRAM on shaped links: with and without a DRAM tier, by the share that fits."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from dualpath.core.modes import Mode
from dualpath.report.model import NOTHING, Panel, Series, Table
from dualpath.workload.replay.client import ReplayOptions
from dualpath.workload.replay.result import ToolDelays, TurnRecord
from dualpath_lab.experiments.engine_nodes import EmulatedEngines
from dualpath_lab.experiments.jct import agents_of, lab_run_of, setting_lines
from dualpath_lab.experiments.report import ExperimentReport, Target
from dualpath_lab.experiments.runs import (
    Measured,
    Variant,
    engine_cpu_s,
    link_line,
    machine_lines,
    paired_ratio,
    run_data,
    run_interleaved,
    too_busy,
)
from dualpath_lab.experiments.settings import EmulatedNodes, TierSettings
from dualpath_lab.experiments.workload import windows, working_set_tokens
from dualpath_lab.nodes.cluster import LinkReport
from dualpath_lab.nodes.settings import LabSettings

# -------------------------------------------------------------------------------- dram tier report
# The report on a DRAM tier: speed-up and ratio to Oracle, by the share that fits.

ORACLE = Mode.ORACLE.value
#: Limits: JCT / Oracle's if all fits; speed-up by the tier if a part fits; JCT with / without the
#: tier if nothing fits; TTFT / Oracle's after pauses.
FITS_RATIO, PART_GAIN, NOTHING_RATIO, PAUSE_RATIO = 1.05, 1.3, 1.02, 1.1
#: Name of the router's counter, in bytes by engine.
_DRAM_HITS = "dram_hit_bytes"


class Share(NamedTuple):
    """A share of the working set; each node has ``dram_bytes`` for it in addition to its buffer."""

    share: float
    dram_bytes: int

    def name(self, *, tier: bool) -> str:
        """Return the name of its runs."""
        return f"{self.share:.0%}, {'tier' if tier else 'no tier'}"


class TierJob(msgspec.Struct, frozen=True, kw_only=True):
    """All runs: for every share without and with a tier, and Oracle."""

    settings: TierSettings
    lab: LabSettings
    links: tuple[LinkReport, ...]
    working_set_bytes: float
    agents: int
    shares: Sequence[Share]
    runs: Mapping[str, Sequence[Measured]]

    @property
    def waits(self) -> bool:
        """Whether agents wait for their tools."""
        return self.settings.tool_delays is ToolDelays.RECORDED

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of KV of a token."""
        return self.settings.jct.emulated.kv_bytes_per_token

    def judged(self, run: Measured) -> list[TurnRecord]:
        """Return the turns of a run that count for the target by their latency.

        If agents wait for tools: turns after a pause longer than one storage NIC needs for their
        hits; otherwise all turns.
        """
        per_s = self.lab.snic_bytes_per_s / self.kv_bytes_per_token
        turns = [turn for turn in run.client.replay.turns if turn.ttft_s is not None]
        if not self.waits:
            return turns
        return [turn for turn in turns if turn.delay_s > turn.ideal_hit_tokens / per_s]

    def ttft_p50_s(self, run: Measured) -> float:
        """Return the median TTFT of these turns, 0 without any."""
        found = [turn.ttft_s for turn in self.judged(run) if turn.ttft_s is not None]
        return statistics.median(found) if found else 0.0


def tier_report(job: TierJob, command: str) -> ExperimentReport:
    """Return the report."""
    runs = [run for done in job.runs.values() for run in done]
    return ExperimentReport(
        name=job.settings.jct.name,
        title="KV in DRAM on shaped links",
        command=command,
        settings=(*_setting_lines(job), link_line(job.links), *machine_lines(runs)),
        tables=(_times(job), _bytes(job)),
        panels=(_panel(job),),
        targets=tuple(_targets(job)),
        data={"working_set_bytes": job.working_set_bytes, "runs": _data(job)},
        too_busy=too_busy(runs),
    )


def _setting_lines(job: TierJob) -> list[str]:
    settings, nodes = job.settings, job.settings.jct.emulated
    given = ", ".join(f"{one.share:.0%}: {one.dram_bytes / 1e6:.0f} MB" for one in job.shares)
    lines = [
        *setting_lines(settings.jct),
        f"Mode {settings.jct.mode[0]}, without and with a tier.",
        f"Working set: {job.working_set_bytes / 1e6:.0f} MB, the KV of {job.agents} agents after "
        f"their last turn. Each node has a buffer of {nodes.buffer_bytes / 1e6:.0f} MB and "
        f"additional DRAM, with and without a tier: {given}.",
        "Ratios are of runs of one round, which follow each other; medians over rounds.",
    ]
    if job.waits:
        cut_s = settings.jct.windows.longest_pause_s
        lines.append(
            f"Recorded tool times, at most {cut_s:g} s each; agents' hints: "
            f"{settings.session_hints.value}. TTFT is that of turns after a pause longer than one "
            f"storage NIC needs for their hits, {len(job.judged(job.runs[ORACLE][0]))} of "
            f"{len(job.runs[ORACLE][0].client.replay.turns)}."
        )
    return lines


def _bases(job: TierJob) -> dict[str, str]:
    """Return the name of each variant with a tier with that of its variant without."""
    return {share.name(tier=True): share.name(tier=False) for share in job.shares}


def _times(job: TierJob) -> Table:
    rows = []
    for name, runs in job.runs.items():
        base = _bases(job).get(name)
        jct_s = [run.jct_s for run in runs]
        rows.append(
            (
                name,
                f"{statistics.median(jct_s):.2f}",
                f"{min(jct_s):.2f} - {max(jct_s):.2f}",
                NOTHING if base is None else f"{paired_ratio(job.runs, base, name):.2f}",
                f"{paired_ratio(job.runs, name, ORACLE):.3f}",
                f"{statistics.median(map(job.ttft_p50_s, runs)):.2f}",
                f"{paired_ratio(job.runs, name, ORACLE, job.ttft_p50_s):.2f}",
                f"{max(run.busy for run in runs):.0%}",
            )
        )
    columns = (
        *("share that fits", "JCT s", "range s", "speed-up by the tier", "x oracle", "TTFT p50 s"),
        *("x oracle's", "machine busy"),
    )
    return Table(f"{job.lab.nodes}: {job.agents} agents", columns, tuple(rows))


def _bytes(job: TierJob) -> Table:
    rows = []
    for name, runs in job.runs.items():
        if name == ORACLE:
            continue
        sent = [max(run.node_bytes("cnic_out").values()) for run in runs]
        taken = [max(run.node_bytes("cnic_in").values()) for run in runs]
        time_s = [run.jct_s for run in runs]
        rows.append(
            (
                name,
                f"{statistics.median(map(dram_share, runs)):.0%}",
                f"{statistics.median(run.storage_bytes for run in runs) / 1e9:.2f}",
                f"{_use(sent, time_s, job):.0%}",
                f"{_use(taken, time_s, job):.0%}",
                f"{statistics.median(map(engine_cpu_s, runs)):.1f}",
            )
        )
    columns = (
        *("share that fits", "hits from DRAM", "read GB", "CNIC out, busiest", "CNIC in, busiest"),
        "engines, CPU-s",
    )
    return Table("Sources of hits, and use of links over the whole run", columns, tuple(rows))


def _use(moved_bytes: Sequence[int], time_s: Sequence[float], job: TierJob) -> float:
    rate = job.lab.cnic_bytes_per_s
    return statistics.median(
        moved / passed_s / rate for moved, passed_s in zip(moved_bytes, time_s, strict=True)
    )


def dram_share(run: Measured) -> float:
    """Return the share of the bytes of a run's hits that came from DRAM, 0 without hits."""
    server = run.client.replay.server
    found = {} if server is None else server.other.get(_DRAM_HITS, {})
    cached = sum(found.values())
    read = run.storage_bytes
    return cached / (cached + read) if cached + read else 0.0


def _targets(job: TierJob) -> list[Target]:
    found = []
    for share in job.shares:
        tier, without = share.name(tier=True), share.name(tier=False)
        if job.waits:
            what = f"{share.share:.0%} fits: TTFT p50 after long pauses / Oracle's"
            ratio = paired_ratio(job.runs, tier, ORACLE, job.ttft_p50_s)
            found.append(Target(what, ratio, PAUSE_RATIO, False))
        elif share.share >= 1:
            ratio = paired_ratio(job.runs, tier, ORACLE)
            found.append(Target("all fits: JCT / Oracle's", ratio, FITS_RATIO, False))
        elif share.share > 0:
            ratio = paired_ratio(job.runs, without, tier)
            what = f"{share.share:.0%} fits: JCT without a tier / with it"
            found.append(Target(what, ratio, PART_GAIN, True))
        else:
            ratio = paired_ratio(job.runs, tier, without)
            what = "nothing fits: JCT with a tier / without it"
            found.append(Target(what, ratio, NOTHING_RATIO, False))
    return found


def _panel(job: TierJob) -> Panel:
    shares = tuple(f"{share.share:.0%}" for share in job.shares)
    series = []
    for tier in (False, True):
        names = [share.name(tier=tier) for share in job.shares]
        times = [statistics.median(run.jct_s for run in job.runs[name]) for name in names]
        series.append(Series("tier" if tier else "no tier", shares, tuple(times)))
    oracle_s = statistics.median(run.jct_s for run in job.runs[ORACLE])
    series.append(Series(ORACLE, shares, (oracle_s,) * len(shares)))
    return Panel(
        "Job completion time",
        "grouped",
        "share of the working set that fits",
        "JCT (s)",
        tuple(series),
    )


def _data(job: TierJob) -> dict[str, list[dict[str, object]]]:
    return {
        name: [
            {**run_data(run), "dram_share": dram_share(run), "ttft_p50_s": job.ttft_p50_s(run)}
            for run in runs
        ]
        for name, runs in job.runs.items()
    }


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
