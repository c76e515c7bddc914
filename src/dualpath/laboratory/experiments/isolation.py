"""Isolation of the inference lane (§5.1, A.1): an all-to-all with KV bulk, without and with QoS.

On hardware the virtual lanes of the compute NIC separate KV from collectives; in the lab the two
HTB classes of every CNIC and loopback device do.  The bulk is real:  Layer Blocks that
`NixlTransport` writes from DEs to PEs; it saturates its links.
"""

from collections.abc import Callable, Iterator

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.laboratory.experiments.isolation_bulk import BulkChecked, BulkCount
from dualpath.laboratory.experiments.isolation_nodes import (
    BulkProcesses,
    ExchangeProcesses,
    bulk_processes,
    exchange_processes,
)
from dualpath.laboratory.experiments.isolation_report import Run, isolation_report
from dualpath.laboratory.experiments.isolation_settings import Case, IsolationSettings, Leg
from dualpath.laboratory.experiments.machine_load import BusyMeter, repeat_while_busy
from dualpath.laboratory.experiments.report import ExperimentReport
from dualpath.laboratory.lab.cluster import link_reports
from dualpath.laboratory.lab.janitor import temporary_lab
from dualpath.laboratory.lab.machine import find_machine
from dualpath.laboratory.lab.settings import Shaping


class RunContext(msgspec.Struct, frozen=True):
    """The context of runs: leg, case, repetition, and the processes of the bulk, if any."""

    leg: Leg
    case: Case
    repetition: int
    bulk: BulkProcesses | None = None

    def count(self) -> list[BulkCount]:
        """Return the bytes that every source of the bulk has transferred so far."""
        return [] if self.bulk is None else self.bulk.count()


def measure_isolation(
    settings: IsolationSettings, progress: Callable[[str], None] = lambda line: None
) -> ExperimentReport:
    """Make a lab, measure every case on it, remove it, and return the report.

    Raises ``ConfigError`` if a lab of that name exists or the machine cannot shape links,
    ``EngineLostError``, ``DeadlineError`` or ``TransportError`` if a process on a node fails.
    The lab is removed in any case, also after ``kill -9``.
    """
    wanted = settings.lab_settings
    if find_machine(wanted).shaping is Shaping.TOKEN_BUCKETS:
        raise ConfigError(
            "isolation needs links shaped by the kernel, which this user may not make; run as root "
            "or allow user namespaces (docs/how-to/lab.md)"
        )
    with temporary_lab(wanted) as state:
        runs: list[Run] = []
        checks: list[BulkChecked] = []
        for leg in settings.legs:
            with exchange_processes(settings, state, leg) as exchange:
                for repetition in range(settings.repeat):
                    for case in Case:
                        if case is Case.ALONE:
                            context = RunContext(leg, case, repetition)
                            runs += _measure_sizes(settings, exchange, context, progress)
                            continue
                        with bulk_processes(settings, state, leg, case) as bulk:
                            context = RunContext(leg, case, repetition, bulk)
                            runs += _measure_sizes(settings, exchange, context, progress)
                            checks.append(bulk.stop())
        return isolation_report(settings, runs, checks, link_reports(state))


def _measure_sizes(
    settings: IsolationSettings,
    exchange: ExchangeProcesses,
    context: RunContext,
    progress: Callable[[str], None],
) -> Iterator[Run]:
    """Yield one run per size, repeated while the machine is too busy; the last attempt counts."""
    for message_bytes in settings.message_bytes:

        def once(rejected: int, message_bytes: int = message_bytes) -> Run:
            run = _measure_run(settings, exchange, context, message_bytes, rejected)
            progress(run.text)
            return run

        yield repeat_while_busy(once, lambda run: run.busy > settings.most_busy, settings.attempts)


def _measure_run(
    settings: IsolationSettings,
    exchange: ExchangeProcesses,
    context: RunContext,
    message_bytes: int,
    rejected: int,
) -> Run:
    period_s = settings.period_s(context.leg, message_bytes)
    rounds = settings.rounds_of_run(context.leg, message_bytes)
    meter = BusyMeter()
    before = context.count()
    results = exchange.measure(message_bytes, period_s, rounds)
    after = context.count()
    return Run(
        leg=context.leg,
        case=context.case,
        repetition=context.repetition,
        message_bytes=message_bytes,
        round_s=tuple(one for result in results for one in result.round_s),
        late=sum(result.late for result in results),
        wrong_messages=sum(result.wrong for result in results),
        bulk_bytes_per_s=_bytes_per_s(before, after),
        busy=meter.busy(),
        rejected=rejected,
        first=exchange.first,
    )


def _bytes_per_s(before: list[BulkCount], after: list[BulkCount]) -> float:
    """Return the total rate of all sources."""
    pairs = zip(before, after, strict=True)
    return sum((end.bytes - begin.bytes) / (end.at_s - begin.at_s) for begin, end in pairs)
