"""What a campaign found, as a report: targets, requests, the matrix, what was seen."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

import msgspec

from dualpath.laboratory.chaos.account import BAD, CellCount
from dualpath.laboratory.chaos.ask import Outcome
from dualpath.laboratory.chaos.campaign import CampaignResult
from dualpath.laboratory.chaos.matrix import FAULTS_OF, Component, Fault, Step
from dualpath.laboratory.experiments.report import ExperimentReport, Target
from dualpath.laboratory.workload.replay.machine import this_machine
from dualpath.report.model import NOTHING, Table

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
        f"{settings.front_ends or 'no'} front ends before the router; every token is compared "
        "where it is answered",
        result.victims,
        f"{load.agents} agents that ask without a pause, contexts up to "
        f"{load.context_tokens + load.append_tokens} tokens; {load.leave_share:.0%} of requests "
        f"lose their client; deadline {load.request_deadline_s:g} s",
        f"seed {settings.seed}; at most {settings.at_once} faults at once; "
        f"{result.faults} faults in {result.seconds:.0f} s on {this_machine().cpu_count} cores, "
        f"whose load average was {result.load_average:.0f}, this campaign and all else",
    )


def _targets(result: CampaignResult) -> tuple[Target, ...]:
    outcomes = result.account.outcomes
    back_s = [back.token_s for back in result.account.router_backs]
    zeros = {
        "requests late": outcomes.get(Outcome.LATE, 0),
        "requests with wrong tokens": outcomes.get(Outcome.WRONG, 0),
        "requests that ended without a clear word": outcomes.get(Outcome.UNCLEAR, 0),
        "requests lost to one fault of one engine": len(result.account.lost_to_one),
        "KV found wrong where it arrived": result.wrong_kv,
        "things left in a calm cluster": len(result.left),
        "processes that did not end or come back": sum(result.troubles.values()),
    }
    targets = [Target(what, found, 0, at_least=False) for what, found in zeros.items()]
    if back_s:
        targets.append(
            Target(
                "longest time from a kill of the router to the next new token, s",
                max(back_s),
                _ROUTER_BACK_S,
                at_least=False,
                note=f"{len(back_s)} of {_router_kills(result)} kills, the others were followed by "
                f"another fault first; median {median(back_s):.2f} s",
            )
        )
    return tuple(targets)


def _requests(result: CampaignResult) -> Table:
    outcomes = result.account.outcomes
    rows = [(outcome.value, f"{outcomes.get(outcome, 0):,}") for outcome in Outcome]
    rows += [
        ("blocks loaded and right", f"{result.loaded_blocks:,}"),
        ("blocks damaged on disk", f"{result.damaged_blocks:,}"),
        ("blocks refused when read", f"{result.refused_blocks:,}"),
    ]
    return Table("Requests and blocks", ("ended", "number"), tuple(rows))


def _router_kills(result: CampaignResult) -> int:
    return sum(
        count.made
        for cell, count in result.account.cells.items()
        if cell.component is Component.ROUTER and cell.fault is Fault.KILL
    )


def _router_back(result: CampaignResult) -> tuple[Table, ...]:
    """What the time from a kill of the router to a token is made of."""
    backs = result.account.router_backs
    if not backs:
        return ()
    steps = (
        ("the next router answers", [back.answers_s for back in backs]),
        ("it knows all engines", [back.engines_s for back in backs]),
        ("a client asks again", [back.asked_s for back in backs]),
        ("that client gets a token", [back.token_s for back in backs]),
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
                for cell, count in result.account.cells.items()
                if cell.component is component and cell.fault is fault
            ]
            if counts:
                rows.append((f"{component.value}, {fault.value}", *_cells(counts)))
    columns = ("component, fault", "made", "requests met", "well", "clear error", "cut", "left")
    return Table(
        "Requests that met a fault, by fault", (*columns, "bad"), tuple(rows), rules=tuple(rules)
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
    """Faults made of each component at each step, and how many requests that met them went bad."""
    rows = []
    for step in Step:
        row = [step.value]
        for component in Component:
            counts = [
                count
                for cell, count in result.account.cells.items()
                if cell.component is component and cell.step is step
            ]
            made = sum(count.made for count in counts)
            bad = sum(count.outcomes.get(outcome, 0) for count in counts for outcome in BAD)
            row.append(f"{made} / {bad}" if made else NOTHING)
        rows.append(tuple(row))
    return Table(
        "Faults made at each step / requests that went bad",
        ("step", *(component.value for component in Component)),
        tuple(rows),
        align="l" + "r" * len(Component),
    )


def _seen(result: CampaignResult) -> tuple[Table, ...]:
    left, lost = Counter(result.left), Counter(result.account.lost_to_one)
    tables = (
        _counted("Errors that clients got", result.account.examples),
        _counted("Lost to one fault of one engine", lost),
        _counted("Left in a calm cluster", left),
        _counted("Processes that did not end or come back", result.troubles),
        _counted("Steps that were not reached in time", result.missed),
        _counted("Tracebacks in logs", result.tracebacks),
    )
    return tuple(table for table in tables if table.rows)


def _counted(title: str, counts: Mapping[str, int]) -> Table:
    by_number: Iterable[tuple[str, int]] = sorted(counts.items(), key=lambda item: -item[1])
    rows = [(what[:_EXAMPLE_CHARACTERS], f"{number:,}") for what, number in by_number]
    return Table(title, ("what", "times"), tuple(rows[:_MOST_EXAMPLES]))


def _data(result: CampaignResult) -> dict[str, Any]:
    """Return every number behind the tables: also the whole matrix, cell by cell."""
    cells = [
        {**msgspec.to_builtins(cell), **msgspec.to_builtins(count)}
        for cell, count in result.account.cells.items()
    ]
    return {
        "settings": msgspec.to_builtins(result.settings),
        "load": msgspec.to_builtins(result.load),
        "faults": result.faults,
        "outcomes": msgspec.to_builtins(result.account.outcomes),
        "matrix": cells,
        "router_back": msgspec.to_builtins(result.account.router_backs),
        "loaded_blocks": result.loaded_blocks,
        "refused_blocks": result.refused_blocks,
        "damaged_blocks": result.damaged_blocks,
        "seconds": result.seconds,
    }
