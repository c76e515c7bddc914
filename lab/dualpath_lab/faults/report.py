"""The report of a campaign: targets, requests, the matrix of faults, errors found."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from dualpath.node.machine import this_machine
from dualpath.report.model import NOTHING, Table
from dualpath_lab.experiments.report import ExperimentReport, Target
from dualpath_lab.faults.campaign import CampaignResult
from dualpath_lab.faults.load import Outcome
from dualpath_lab.faults.matrix import FAULTS_OF, Component, Fault, Step
from dualpath_lab.faults.summary import BAD, CellCount

_ROUTER_BACK_S = 3.0
_MOST_EXAMPLES = 12
_EXAMPLE_CHARACTERS = 220


def chaos_report(result: CampaignResult, name: str, command: str) -> ExperimentReport:
    """Return the report of one campaign; ``name`` names its files."""
    return ExperimentReport(
        name=name,
        title="Faults on real processes",
        command=command,
        settings=_settings(result),
        targets=_targets(result),
        tables=(
            *(_requests(result), *_router_back(result)),
            *(_by_fault(result), _by_step(result), *_seen(result)),
        ),
        data=_data(result),
    )


def _settings(result: CampaignResult) -> tuple[str, ...]:
    settings, load = result.settings, result.load
    return (
        f"{settings.prefill} prefill and {settings.decode} decode engines, in data-parallel groups "
        f"of {settings.prefill_dp} and {settings.decode_dp}; "
        f"{settings.front_ends or 'no'} separate front ends; clients compare every token",
        result.engines,
        f"{load.agents} agents that send requests without pause, contexts up to "
        f"{load.context_tokens + load.append_tokens} tokens; clients disconnect in "
        f"{load.leave_share:.0%} of requests; deadline {load.request_deadline_s:g} s",
        f"seed {settings.seed}; at most {settings.at_once} concurrent faults; "
        f"{result.faults} faults in {result.seconds:.0f} s on {this_machine().cpu_count} cores "
        f"with a load average of {result.load_average:.0f}, including this campaign",
    )


def _targets(result: CampaignResult) -> tuple[Target, ...]:
    outcomes = result.summary.outcomes
    token_s = [back.token_s for back in result.summary.router_recoveries]
    zeros = {
        "requests late": outcomes.get(Outcome.LATE, 0),
        "requests with wrong tokens": outcomes.get(Outcome.WRONG, 0),
        "requests that ended without a clear error": outcomes.get(Outcome.UNCLEAR, 0),
        "requests lost to one fault of one engine": len(result.summary.lost_to_single_fault),
        "wrong KV on arrival": result.wrong_kv,
        "leaks in the idle cluster": len(result.leaks),
        "processes that did not end or restart": sum(result.problems.values()),
    }
    targets = [Target(what, found, 0, at_least=False) for what, found in zeros.items()]
    if token_s:
        targets.append(
            Target(
                "longest time from a kill of the router to the next new token, s",
                max(token_s),
                _ROUTER_BACK_S,
                at_least=False,
                note=f"{len(token_s)} of {_router_kills(result)} kills; another fault hit the "
                f"router too early after the others; median {median(token_s):.2f} s",
            )
        )
    return tuple(targets)


def _requests(result: CampaignResult) -> Table:
    outcomes = result.summary.outcomes
    rows = [(outcome.value, f"{outcomes.get(outcome, 0):,}") for outcome in Outcome]
    rows += [
        ("blocks loaded and verified", f"{result.loaded_blocks:,}"),
        ("blocks damaged on disk", f"{result.damaged_blocks:,}"),
        ("blocks refused when read", f"{result.refused_blocks:,}"),
    ]
    return Table("Requests and blocks", ("outcome", "number"), tuple(rows))


def _router_kills(result: CampaignResult) -> int:
    return sum(
        count.made
        for cell, count in result.summary.cells.items()
        if cell.component is Component.ROUTER and cell.fault is Fault.KILL
    )


def _router_back(result: CampaignResult) -> tuple[Table, ...]:
    """The steps from a kill of the router to the next token."""
    backs = result.summary.router_recoveries
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
                count
                for cell, count in result.summary.cells.items()
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
                count
                for cell, count in result.summary.cells.items()
                if cell.component is component and cell.step is step
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
    leaks, lost = Counter(result.leaks), Counter(result.summary.lost_to_single_fault)
    tables = (
        _counted("Errors that clients got", result.summary.examples),
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


def _data(result: CampaignResult) -> dict[str, Any]:
    """Return all numbers behind the tables, and the whole matrix cell by cell."""
    cells = [
        {**msgspec.to_builtins(cell), **msgspec.to_builtins(count)}
        for cell, count in result.summary.cells.items()
    ]
    return {
        "settings": msgspec.to_builtins(result.settings),
        "load": msgspec.to_builtins(result.load),
        "faults": result.faults,
        "outcomes": msgspec.to_builtins(result.summary.outcomes),
        "matrix": cells,
        "router_back": msgspec.to_builtins(result.summary.router_recoveries),
        "loaded_blocks": result.loaded_blocks,
        "refused_blocks": result.refused_blocks,
        "damaged_blocks": result.damaged_blocks,
        "seconds": result.seconds,
    }
