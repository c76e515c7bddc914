"""KV cached in DRAM on shaped links: with and without a DRAM tier, by the share that fits."""

import statistics
from collections.abc import Callable, Iterator, Sequence

import msgspec

from dualpath.core.modes import Mode
from dualpath.report.model import NOTHING, Panel, Series, Table, cell
from dualpath.workload.replay.client import ReplayOptions
from dualpath.workload.replay.result import ToolDelays, TurnRecord
from dualpath_lab.experiments.engine_nodes import EmulatedEngines
from dualpath_lab.experiments.jct import (
    RATIO_TOLERANCE,
    TIME_TOLERANCE,
    Variant,
    agents_of,
    lab_stage,
    published_results,
    setting_lines,
    spoilt,
    summary_of,
)
from dualpath_lab.experiments.runs import (
    LabResult,
    Measured,
    lab_result,
    link_lines,
    load_lines,
    too_busy,
)
from dualpath_lab.experiments.settings import TierSettings
from dualpath_lab.experiments.workload import windows, working_set_tokens
from dualpath_lab.nodes.cluster import LinkReport
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    Progress,
    RawData,
    Stage,
    tolerance_of,
)

ORACLE = Mode.ORACLE.value
#: Limits: JCT / Oracle's if all fits; speed-up by the tier if a part fits; JCT with / without the
#: tier if nothing fits; TTFT / Oracle's after pauses.
FITS_RATIO, PART_GAIN, NOTHING_RATIO, PAUSE_RATIO = 1.05, 1.3, 1.02, 1.1
#: Name of the router's counter, in bytes by engine.
_DRAM_HITS = "dram_hit_bytes"


class TierResult(LabResult, frozen=True, kw_only=True, omit_defaults=True):
    """A run; ``dram_share`` of the bytes of its hits came from DRAM.

    ``ttft_p50_s`` is the median TTFT of the turns that count for the target (``judged``), which are
    ``judged_turns`` of all turns.  ``working_set_bytes`` is the KV of all agents after their last
    turn.
    """

    dram_share: float
    ttft_p50_s: float
    judged_turns: int = 0
    working_set_bytes: float = 0.0


def waits(settings: TierSettings) -> bool:
    """Return whether agents wait for their tools."""
    return settings.tool_delays is ToolDelays.RECORDED


def judged(run: Measured, settings: TierSettings, lab: LabSettings) -> list[TurnRecord]:
    """Return the turns of a run that count for the target by their latency.

    If agents wait for tools: turns after a pause longer than one storage NIC needs for their hits;
    otherwise all turns.
    """
    per_s = lab.snic_bytes_per_s / settings.jct.emulated.kv_bytes_per_token
    turns = [turn for turn in run.client.replay.turns if turn.ttft_s is not None]
    if not waits(settings):
        return turns
    return [turn for turn in turns if turn.delay_s > turn.ideal_hit_tokens / per_s]


def dram_share(run: Measured) -> float:
    """Return the share of the bytes of a run's hits that came from DRAM, 0 without hits."""
    server = run.client.replay.server
    found = {} if server is None else server.other.get(_DRAM_HITS, {})
    cached = sum(found.values())
    read = run.storage_bytes
    return cached / (cached + read) if cached + read else 0.0


def tier_result(
    run: Measured,
    settings: TierSettings,
    lab: LabSettings,
    links: tuple[LinkReport, ...],
    working_set_bytes: float,
) -> TierResult:
    """Reduce a run."""
    turns = judged(run, settings, lab)
    ttft_s = [turn.ttft_s for turn in turns if turn.ttft_s is not None]
    return TierResult(
        dram_share=dram_share(run),
        ttft_p50_s=statistics.median(ttft_s) if ttft_s else 0.0,
        judged_turns=len(turns),
        working_set_bytes=working_set_bytes,
        **msgspec.structs.asdict(lab_result(run, lab, links)),
    )


def variant_name(share: float, *, tier: bool) -> str:
    """Return the name of the runs of a share of the working set."""
    return f"{share:.0%}, {'tier' if tier else 'no tier'}"


def _stages(settings: TierSettings, progress: Progress) -> Iterator[Stage[Variant, TierResult]]:
    jct = settings.jct
    lab = jct.lab_of(jct.nodes[0])
    working_set_bytes = _working_set_bytes(settings, lab)

    def reduce(run: Measured, lab: LabSettings, links: tuple[LinkReport, ...]) -> TierResult:
        return tier_result(run, settings, lab, links, working_set_bytes)

    def engines(share: float, *, tier: bool) -> EmulatedEngines:
        dram_bytes = _dram_bytes(share, working_set_bytes, lab)
        made = msgspec.structs.replace(jct.emulated, dram_bytes=dram_bytes, dram_tier=tier)
        return EmulatedEngines(made)

    cells = {
        variant_name(share, tier=tier): Variant(jct.mode[0], engines(share, tier=tier))
        for share in settings.shares
        for tier in (False, True)
    }
    cells[ORACLE] = Variant(Mode.ORACLE, EmulatedEngines(jct.emulated))
    options = ReplayOptions(
        seed=jct.seed, tool_delays=settings.tool_delays, session_hints=settings.session_hints
    )
    yield lab_stage(jct, lab, cells, progress, reduce, options)


def _working_set_bytes(settings: TierSettings, lab: LabSettings) -> float:
    agents = windows(agents_of(settings.jct, lab))
    return working_set_tokens(agents) * settings.jct.emulated.kv_bytes_per_token


def _dram_bytes(share: float, working_set_bytes: float, lab: LabSettings) -> int:
    """Return the DRAM of each node in addition to its buffer."""
    return int(share * working_set_bytes / lab.decode)


# ------------------------------------------------------------------------------------------- page
# The page on a DRAM tier: speed-up and ratio to Oracle, by the share that fits.

Raw = RawData[TierSettings, TierResult]


def draw(raw: Raw) -> Page:
    """Draw the page."""
    return Page(
        settings=(
            *_setting_lines(raw),
            *link_lines(raw.results),
            *load_lines(raw, raw.results),
        ),
        tables=(_times(raw), _bytes(raw)),
        panels=(_panel(raw),),
        results=(*_targets(raw), *_repeatable(raw)),
        too_busy=too_busy(raw.results),
    )


def _lab(raw: Raw) -> LabSettings:
    return raw.settings.jct.lab_of(raw.settings.jct.nodes[0])


def _agents(raw: Raw) -> int:
    return agents_of(raw.settings.jct, _lab(raw)).agents


def _setting_lines(raw: Raw) -> list[str]:
    settings, nodes = raw.settings, raw.settings.jct.emulated
    any_run = raw.results[0]
    given = ", ".join(
        f"{share:.0%}: {_dram_bytes(share, any_run.working_set_bytes, _lab(raw)) / 1e6:.0f} MB"
        for share in settings.shares
    )
    lines = [
        *setting_lines(settings.jct),
        f"Mode {settings.jct.mode[0]}, without and with a tier.",
        f"Working set: {any_run.working_set_bytes / 1e6:.0f} MB, the KV of {_agents(raw)} agents "
        f"after their last turn. Each node has a buffer of {nodes.buffer_bytes / 1e6:.0f} MB and "
        f"additional DRAM, with and without a tier: {given}.",
        "Ratios are of runs of one round, which follow each other; medians over rounds.",
    ]
    if waits(settings):
        cut_s = settings.jct.windows.longest_pause_s
        run = next(iter(raw.of(ORACLE)), any_run)
        turns = run.judged_turns if run.summary is None else run.summary.turns
        lines.append(
            f"Recorded tool times, at most {cut_s:g} s each; agents' hints: "
            f"{settings.session_hints.value}. TTFT is that of turns after a pause longer than one "
            f"storage NIC needs for their hits, {run.judged_turns} of {turns}."
        )
    return lines


def _bases(raw: Raw) -> dict[str, str]:
    """Return the name of each variant with a tier with that of its variant without."""
    return {
        variant_name(share, tier=True): variant_name(share, tier=False)
        for share in raw.settings.shares
    }


def _times(raw: Raw) -> Table:
    rows = []
    for name in raw.cells:
        runs, base = raw.of(name), _bases(raw).get(name)
        jct_s = [run.jct_s for run in runs]
        rows.append(
            (
                name,
                f"{statistics.median(jct_s):.2f}",
                f"{min(jct_s):.2f} - {max(jct_s):.2f}",
                NOTHING if base is None else cell(raw.ratio(base, name, _jct_s), "{:.2f}"),
                cell(raw.ratio(name, ORACLE, _jct_s), "{:.3f}"),
                f"{statistics.median(map(_ttft_p50_s, runs)):.2f}",
                cell(raw.ratio(name, ORACLE, _ttft_p50_s), "{:.2f}"),
                f"{max(run.busy for run in runs):.0%}",
            )
        )
    columns = (
        *("share that fits", "JCT s", "range s", "speed-up by the tier", "x oracle", "TTFT p50 s"),
        *("x oracle's", "machine busy"),
    )
    return Table(f"{_lab(raw).nodes}: {_agents(raw)} agents", columns, tuple(rows))


def _bytes(raw: Raw) -> Table:
    rows = []
    for name in raw.cells:
        if name == ORACLE:
            continue
        runs = raw.of(name)
        rows.append(
            (
                name,
                f"{statistics.median(run.dram_share for run in runs):.0%}",
                f"{statistics.median(run.storage_bytes for run in runs) / 1e9:.2f}",
                _use(raw, runs, lambda run: run.cnic_out_bytes),
                _use(raw, runs, lambda run: run.cnic_in_bytes),
                f"{statistics.median(run.engine_cpu_s for run in runs):.1f}",
            )
        )
    columns = (
        *("share that fits", "hits from DRAM", "read GB", "CNIC out, busiest", "CNIC in, busiest"),
        "engines, CPU-s",
    )
    return Table("Sources of hits, and use of links over the whole run", columns, tuple(rows))


def _use(
    raw: Raw, runs: Sequence[TierResult], moved_bytes: Callable[[TierResult], dict[str, int]]
) -> str:
    """Return the use of the busiest CNIC over the whole run, `-` if it was not recorded."""
    rate = _lab(raw).cnic_bytes_per_s
    shares = [max(moved_bytes(run).values()) / run.jct_s / rate for run in runs if moved_bytes(run)]
    return f"{statistics.median(shares):.0%}" if shares else NOTHING


def _targets(raw: Raw) -> Iterator[KeyResult]:
    for share in raw.settings.shares:
        tier, without = variant_name(share, tier=True), variant_name(share, tier=False)
        if waits(raw.settings):
            what = f"{share:.0%} fits: TTFT p50 after long pauses / Oracle's"
            ratio = raw.ratio(tier, ORACLE, _ttft_p50_s)
            yield KeyResult(what, ratio, PAUSE_RATIO, at_least=False)
        elif share >= 1:
            ratio = raw.ratio(tier, ORACLE, _jct_s)
            yield KeyResult("all fits: JCT / Oracle's", ratio, FITS_RATIO, at_least=False)
        elif share > 0:
            ratio = raw.ratio(without, tier, _jct_s)
            yield KeyResult(f"{share:.0%} fits: JCT without a tier / with it", ratio, PART_GAIN)
        else:
            ratio = raw.ratio(tier, without, _jct_s)
            what = "nothing fits: JCT with a tier / without it"
            yield KeyResult(what, ratio, NOTHING_RATIO, at_least=False)


def _repeatable(raw: Raw) -> Iterator[KeyResult]:
    for name in raw.cells:
        jct_s = raw.median(name, _jct_s)
        within = tolerance_of(TIME_TOLERANCE, len(raw.of(name)))
        yield KeyResult(f"{name}: JCT, s", jct_s, tolerance=within)
    for tier, base in _bases(raw).items():
        if (ratio := raw.ratio(base, tier, _jct_s)) is not None:
            what = f"{tier}: JCT without / with"
            within = tolerance_of(RATIO_TOLERANCE, len(raw.of(tier)))
            yield KeyResult(what, ratio, tolerance=within, any_machine=True)


def _panel(raw: Raw) -> Panel:
    shares = tuple(f"{share:.0%}" for share in raw.settings.shares)
    series = []
    for tier in (False, True):
        names = [variant_name(share, tier=tier) for share in raw.settings.shares]
        times = tuple(raw.median(name, _jct_s) for name in names)
        series.append(Series("tier" if tier else "no tier", shares, times))
    series.append(Series(ORACLE, shares, (raw.median(ORACLE, _jct_s),) * len(shares)))
    return Panel(
        "Job completion time",
        "grouped",
        "share of the working set that fits",
        "JCT (s)",
        tuple(series),
    )


def _jct_s(run: TierResult) -> float:
    return run.jct_s


def _ttft_p50_s(run: TierResult) -> float:
    return run.ttft_p50_s


def _published(page: Page, settings: TierSettings) -> Raw:
    """Convert ``{"working_set_bytes": …, "runs": {variant: [result, …]}}``."""
    modes = {
        name: Mode.ORACLE if name == ORACLE else settings.jct.mode[0] for name in page.data["runs"]
    }
    size_bytes = {"working_set_bytes": page.data["working_set_bytes"]}
    found = {
        name: [{**run, **size_bytes} for run in runs] for name, runs in page.data["runs"].items()
    }
    runs = published_results(found, TierResult, modes)
    return RawData(experiment=DRAM.name, settings=settings, runs=runs)


DRAM = Experiment(
    name="dram",
    title="KV in DRAM on shaped links",
    settings=TierSettings(),
    result=TierResult,
    stages=_stages,
    draw=draw,
    repeat=lambda settings: settings.jct.repeat,
    summary=summary_of,
    too_busy=lambda settings, result: spoilt(settings.jct, result),
    fixed=("dram_bytes", "dram_tier", "vllm"),
    published=_published,
)
