"""The page of all cells: the fastest stack, the ratios, and each stack's bottleneck."""

from collections import Counter
from collections.abc import Mapping, Sequence

from benchmarks.peers.cells import Cell
from benchmarks.peers.report import Measurement, Stack, hit_share, of_stack, own_stack, stacks

from dualpath.laboratory.experiments.report import ExperimentReport
from dualpath.report.model import NOTHING, Table

COMMAND = "python -m benchmarks.peers.matrix --out FOLDER --peer NAME=ENVIRONMENT …"
#: From this utilization on, a link or the cores count as the bottleneck.
_FULL = 0.85
_COLUMNS = (
    *("stack", "runs", "JCT s", "to DualPath", "TTFT p50 s", "TTFT p99 s", "hit tokens"),
    *("SNICs, MB read", "CNICs, MB in", "machine busy", "CPU-s", "waits for"),
    *("same outputs as DualPath", "turns failed"),
)

_DISCUSSION = """\
Each regime is a run of `benchmarks.peers.measure`, whose arguments are stored with its runs in a
file in `cells`;
`benchmarks/peers/README.md` describes the stacks, what they have in common and where they differ.
Bytes are those of the measured turns, a number per node: prefill nodes, then decode nodes.

"Waits for" lists the bottlenecks of a stack's own run: every storage NIC and compute NIC, and the
cores, with a utilization of at least 85 %. During pauses of the agents' tools nothing has to be
busy. Where the cores are the bottleneck, a stack may be faster on more cores."""


def matrix_report(measured: Mapping[Cell, Sequence[Measurement]]) -> ExperimentReport:
    """Return the page, which also names cells without runs."""
    with_runs = [(cell, one) for cell, found in measured.items() for one in found if one.runs]
    run: dict[str, list[str]] = {}
    for cell, one in with_runs:
        run.setdefault(cell.name, []).append(one.machine.cores)
    return ExperimentReport(
        name="peers-matrix",
        title="DualPath and other stacks in every regime",
        command=COMMAND,
        settings=_setting_lines(len(run), len(measured), [one for _, one in with_runs]),
        tables=(_winners(measured), *(_cell_table(cell, one) for cell, one in with_runs)),
        discussion=_DISCUSSION,
        # The runs are in the cells' files.
        data={"regimes": run},
    )


def _setting_lines(run: int, regimes: int, measurements: Sequence[Measurement]) -> tuple[str, ...]:
    runs_of = Counter(
        f"{found.machine.cores}, {found.date}, "
        + ", ".join(f"{name} {number}" for name, number in found.versions.items())
        for found in measurements
    )
    return (
        "Real vLLM engines on CPU at 1P2D, links shaped by the kernel, a model of random weights "
        "with 32,768 bytes of KV per token in float32. Short agents: 12 with 8 turns; long ones: 6 "
        "with 60. DRAM per node holds 1.25 of their KV, a quarter, or no more than the longest "
        "context; storage NICs have 20, 48 or 400 MB/s; a pause is a second before a turn.",
        f"{run} of {regimes} regimes have been run. Compare only within a row: other "
        "processors are faster or slower.",
        *(f"{machine}: {count} regimes." for machine, count in runs_of.items()),
    )


def _winners(measured: Mapping[Cell, Sequence[Measurement]]) -> Table:
    columns = (
        *("agents", "bound by", "DRAM holds", "tools", "processor", "fastest", "JCT s"),
        *("DualPath's", "why"),
    )
    rows: list[tuple[str, ...]] = []
    for cell, found in measured.items():
        regime = (cell.agents, cell.bound, cell.fits, "pauses" if cell.pauses else "none")
        run = [one for one in found if one.runs]
        rows += [(*regime, one.machine.cpu_model, *_fastest(one)) for one in run]
        if not run:
            rows.append((*regime, NOTHING, "not run", *[NOTHING] * 3))
    return Table("Fastest stack", columns, tuple(rows), align="llllllrrl")


def _fastest(measured: Measurement) -> tuple[str, str, str, str]:
    """Return the fastest stack, its JCT, DualPath's JCT, and the reason."""
    ranked = sorted(_without_failures(stacks(measured.runs)), key=lambda stack: stack.jct_s)
    if not ranked:
        return "all had failed turns", NOTHING, NOTHING, NOTHING
    own, first = own_stack(ranked), ranked[0]
    own_jct = f"{own.jct_s:.1f}" if own else NOTHING
    return first.label, f"{first.jct_s:.1f}", own_jct, _why(ranked, own, measured)


def _without_failures(found: Sequence[Stack]) -> list[Stack]:
    """Return the stacks without failed turns, which would shorten their JCT."""
    return [stack for stack in found if not sum(run.turns_failed for run in stack.runs)]


def _why(ranked: Sequence[Stack], own: Stack | None, measured: Measurement) -> str:
    """Return the bottlenecks of the fastest stack and of the one it is compared with."""
    first = ranked[0]
    other = ranked[1:2] if own in (None, first) else [own]
    return "; ".join(
        f"{stack.label} waits for {waits_for(stack, measured)}, "
        f"{sum(stack.typical.snic_bytes.values()) / 1e9:.2f} GB read, "
        f"{hit_share(stack.typical)} hits"
        for stack in (first, *(one for one in other if one is not None))
    )


def waits_for(stack: Stack, measured: Measurement) -> str:
    """Return the bottlenecks of a stack's typical run."""
    run, arguments = stack.typical, measured.arguments
    snic_bytes_per_s = float(str(arguments["snic_mb_per_s"])) * 1e6
    cnic_bytes_per_s = float(str(arguments["cnic_gbit_per_s"])) * 1e9 / 8
    uses = {f"storage at {n}": b / snic_bytes_per_s for n, b in run.snic_bytes.items()}
    uses |= {f"CNIC of {n}": b / cnic_bytes_per_s for n, b in run.cnic_in_bytes.items()}
    shares = {name: used_s / run.jct_s for name, used_s in uses.items()} | {"cores": run.busy}
    saturated = {name: share for name, share in shares.items() if share >= _FULL}
    if not saturated:
        return "nothing saturated"
    return ", ".join(f"{name} ({share:.0%})" for name, share in saturated.items())


def _cell_table(cell: Cell, measured: Measurement) -> Table:
    found = stacks(measured.runs)
    own = own_stack(found)
    rows = [of_stack(stack, own) | _waits(stack, measured) for stack in found]
    title = f"{cell.name}, {measured.machine.cores}"
    return Table(title, _COLUMNS, tuple(tuple(row[name] for name in _COLUMNS) for row in rows))


def _waits(stack: Stack, measured: Measurement) -> dict[str, str]:
    """Return a stack's bytes, CPU time and bottlenecks by column."""
    run = stack.typical
    return {
        "SNICs, MB read": _megabytes(run.snic_bytes),
        "CNICs, MB in": _megabytes(run.cnic_in_bytes),
        "CPU-s": f"{sum(run.cpu_s.values()):.0f}",
        "waits for": waits_for(stack, measured),
    }


def _megabytes(of_nodes: Mapping[str, int]) -> str:
    return " + ".join(f"{count / 1e6:.0f}" for count in of_nodes.values())
