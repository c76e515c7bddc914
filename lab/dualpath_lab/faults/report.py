"""A campaign of faults as an experiment: its run, and its page with the matrix of faults."""

import asyncio
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.report.model import NOTHING, Table
from dualpath_lab.faults.campaign import Campaign, CampaignResult
from dualpath_lab.faults.engine_kinds import EmulatedEngines, EnginesUnderTest, VllmEngines
from dualpath_lab.faults.failpoints import EngineKind
from dualpath_lab.faults.load import Outcome
from dualpath_lab.faults.matrix import FAULTS_OF, Component, Fault, Step
from dualpath_lab.faults.settings import (
    ChaosSettings,
    EmulatedEnginesSettings,
    LoadSettings,
    VllmEnginesSettings,
)
from dualpath_lab.faults.summary import BAD, CellCount
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    Progress,
    RawData,
    Run,
    Stage,
    one_stage,
)

_ROUTER_BACK_S = 3.0
_MOST_EXAMPLES = 12
_EXAMPLE_CHARACTERS = 220
CAMPAIGN = "campaign"


class FaultsSettings(Settings, frozen=True, kw_only=True):
    """A campaign, its agents, and the engines under test."""

    logs: Annotated[
        str, Setting("new folder for logs and storage (default: a temporary one)", metavar="DIR")
    ] = ""
    campaign: ChaosSettings = ChaosSettings()
    agents: LoadSettings = LoadSettings()
    engines: EmulatedEnginesSettings = EmulatedEnginesSettings()
    vllm_engines: VllmEnginesSettings = VllmEnginesSettings()


def _stages(settings: FaultsSettings, progress: Progress) -> list[Stage[None, CampaignResult]]:
    def run(_: None, number: int) -> CampaignResult:
        """Raises ``EngineLostError`` or ``DeadlineError`` if the cluster does not start."""
        engines: EnginesUnderTest
        if settings.campaign.engines is EngineKind.VLLM:
            engines = VllmEngines(settings.vllm_engines)
        else:
            engines = EmulatedEngines(settings.engines)
        with tempfile.TemporaryDirectory(prefix="dualpath-chaos-") as dropped:
            folder = _new_folder(settings.logs) if settings.logs else Path(dropped)
            campaign = Campaign(settings.campaign, settings.agents, engines, folder, progress)
            return asyncio.run(campaign.run())

    return one_stage({CAMPAIGN: None}, run)


def _new_folder(path: str) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"--logs {path}: {error.strerror}; give a new folder") from None
    return folder


def draw(raw: RawData[FaultsSettings, CampaignResult]) -> Page:
    """Draw the page of a campaign."""
    (result,) = raw.results
    return Page(
        settings=_setting_lines(raw.settings, result),
        results=tuple(_results(result)),
        tables=(
            *(_requests(result), *_router_back(result)),
            *(_by_fault(result), _by_step(result), *_seen(result)),
        ),
    )


def _setting_lines(settings: FaultsSettings, result: CampaignResult) -> tuple[str, ...]:
    campaign, load = settings.campaign, settings.agents
    return (
        f"{campaign.prefill} prefill and {campaign.decode} decode engines, in data-parallel groups "
        f"of {campaign.prefill_dp} and {campaign.decode_dp}; "
        f"{campaign.front_ends or 'no'} separate front ends; clients compare every token",
        *([result.engines] if result.engines else []),
        f"{load.agents} agents that send requests without pause, contexts up to "
        f"{load.context_tokens + load.append_tokens} tokens; clients disconnect in "
        f"{load.leave_share:.0%} of requests; deadline {load.request_deadline_s:g} s",
        f"seed {campaign.seed}; at most {campaign.at_once} concurrent faults; "
        f"{result.faults} faults in {result.seconds:.0f} s",
    )


def _results(result: CampaignResult) -> Iterator[KeyResult]:
    zeros = {
        "requests late": result.outcomes.get(Outcome.LATE, 0),
        "requests with wrong tokens": result.outcomes.get(Outcome.WRONG, 0),
        "requests that ended without a clear error": result.outcomes.get(Outcome.UNCLEAR, 0),
        "requests lost to one fault of one engine": len(result.lost_to_single_fault),
        "wrong KV on arrival": result.wrong_kv,
        "leaks in the idle cluster": len(result.leaks),
        "processes that did not end or restart": sum(result.problems.values()),
    }
    for what, found in zeros.items():
        yield KeyResult(what, found, 0, at_least=False)
    token_s = [back.token_s for back in result.router_back]
    if token_s:
        yield KeyResult(
            "longest time from a kill of the router to the next new token, s",
            max(token_s),
            _ROUTER_BACK_S,
            at_least=False,
            note=f"{len(token_s)} of {_router_kills(result)} kills; another fault hit the "
            f"router too early after the others; median {median(token_s):.2f} s",
        )


def _requests(result: CampaignResult) -> Table:
    rows = [(outcome.value, f"{result.outcomes.get(outcome, 0):,}") for outcome in Outcome]
    rows += [
        ("blocks loaded and verified", f"{result.loaded_blocks:,}"),
        ("blocks damaged on disk", f"{result.damaged_blocks:,}"),
        ("blocks refused when read", f"{result.refused_blocks:,}"),
        ("attempts found wrong after they had failed", f"{result.stale_kv:,}"),
    ]
    return Table("Requests and blocks", ("outcome", "number"), tuple(rows))


def _router_kills(result: CampaignResult) -> int:
    return sum(
        cell.made
        for cell in result.matrix
        if cell.component is Component.ROUTER and cell.fault is Fault.KILL
    )


def _router_back(result: CampaignResult) -> tuple[Table, ...]:
    """The steps from a kill of the router to the next token."""
    backs = result.router_back
    if not backs:
        return ()
    steps = (
        ("the next router answers", [back.answers_s for back in backs]),
        ("all engines have registered", [back.engines_s for back in backs]),
        ("a client sends a request", [back.asked_s for back in backs]),
        ("that request has a token", [back.token_s for back in backs]),
    )
    rows = [(what, f"{median(times):.2f}", f"{max(times):.2f}") for what, times in steps]
    return (Table("From a kill of the router, s", ("until", "median", "longest"), tuple(rows)),)


def _by_fault(result: CampaignResult) -> Table:
    rows: list[tuple[str, ...]] = []
    rules: list[int] = []
    for component in Component:
        rules.append(len(rows))
        for fault in FAULTS_OF[component]:
            counts = [
                cell
                for cell in result.matrix
                if cell.component is component and cell.fault is fault
            ]
            if counts:
                rows.append((f"{component.value}, {fault.value}", *_cells(counts)))
    columns = ("component, fault", "injected", "requests", "well", "clear error", "cut", "left")
    return Table(
        "Requests that overlapped a fault, by fault",
        (*columns, "bad"),
        tuple(rows),
        rules=tuple(rules),
    )


def _cells(counts: Sequence[CellCount]) -> tuple[str, ...]:
    def total(*outcomes: Outcome) -> str:
        return f"{sum(count.outcomes.get(o, 0) for count in counts for o in outcomes):,}"

    shown = (Outcome.WELL, Outcome.CLEAR_ERROR, Outcome.CUT, Outcome.LEFT)
    return (
        f"{sum(count.made for count in counts):,}",
        total(*Outcome),
        *map(total, shown),
        total(*BAD),
    )


def _by_step(result: CampaignResult) -> Table:
    """Number of faults per component and step, and of overlapping requests that failed."""
    rows = []
    for step in Step:
        row = [step.value]
        for component in Component:
            counts = [
                cell for cell in result.matrix if cell.component is component and cell.step is step
            ]
            made = sum(count.made for count in counts)
            bad = sum(count.outcomes.get(outcome, 0) for count in counts for outcome in BAD)
            row.append(f"{made} / {bad}" if made else NOTHING)
        rows.append(tuple(row))
    return Table(
        "Faults injected at each step / requests that failed",
        ("step", *(component.value for component in Component)),
        tuple(rows),
        align="l" + "r" * len(Component),
    )


def _seen(result: CampaignResult) -> tuple[Table, ...]:
    leaks, lost = Counter(result.leaks), Counter(result.lost_to_single_fault)
    tables = (
        _counted("Errors that clients got", result.examples),
        _counted("Lost to one fault of one engine", lost),
        _counted("Leaks in the idle cluster", leaks),
        _counted("Processes that did not end or restart", result.problems),
        _counted("Steps that were not reached in time", result.missed),
        _counted("Tracebacks in logs", result.tracebacks),
    )
    return tuple(table for table in tables if table.rows)


def _counted(title: str, counts: Mapping[str, int]) -> Table:
    by_number: Iterable[tuple[str, int]] = sorted(counts.items(), key=lambda item: -item[1])
    rows = [(what[:_EXAMPLE_CHARACTERS], f"{number:,}") for what, number in by_number]
    return Table(title, ("what", "times"), tuple(rows[:_MOST_EXAMPLES]))


def _published(page: Page, settings: FaultsSettings) -> RawData[FaultsSettings, CampaignResult]:
    """Convert the data of one campaign, of which the targets alone count what was left behind."""
    counts = {target.what: int(target.measured or 0) for target in page.results}
    known = {
        "router_back": [
            found for found in page.data.get("router_back", ()) if isinstance(found, dict)
        ],
        "lost_to_single_fault": [""] * counts["requests lost to one fault of one engine"],
        "wrong_kv": counts["KV found wrong where it arrived"],
        "leaks": [""] * counts["things left in a calm cluster"],
        "problems": {"": counts["processes that did not end or come back"]},
    }
    result = msgspec.convert({**page.data, **known}, CampaignResult)
    runs = [Run(cell=CAMPAIGN, round=0, result=result)]
    return RawData(experiment=FAULTS.name, settings=settings, runs=runs)


FAULTS = Experiment(
    name="chaos-run",
    subcommand="run",
    title="Faults on real processes",
    settings=FaultsSettings(),
    result=CampaignResult,
    stages=_stages,
    draw=draw,
    summary=lambda result: f"{result.faults} faults in {result.seconds:.0f} s",
    passed=lambda raw: all(result.is_clean for result in raw.results),
    published=_published,
)
