"""Lines of every report on lab runs: links, load of the machine, verification."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.machine_load import BUSY_LIMIT
from dualpath.laboratory.experiments.runs import Measured
from dualpath.laboratory.lab.cluster import LinkReport


class _Run(Protocol):
    @property
    def mode(self) -> Mode: ...

    @property
    def busy(self) -> float: ...


def link_line(links: Sequence[LinkReport]) -> str:
    """Describe the rate of each kind of link and how it is shaped."""
    found = "; ".join(
        f"{link.link} {link.bytes_per_s / 1e6:g} MB/s ({link.how if link.shaped else 'NOT SHAPED'})"
        for link in links
    )
    return f"Links per node: {found}."


def machine_lines(runs: Sequence[Measured]) -> tuple[str, ...]:
    """Describe the load of the machine and the number of verified blocks."""
    rejected = sum(run.rejected for run in runs)
    spoilt = f", {rejected} spoilt runs repeated" if rejected else ""
    warning = " TOO BUSY: links may not have held their rates." if too_busy(runs) else ""
    return (
        f"Machine at most {_busiest(runs):.0%} busy in a run that uses links (limit "
        f"{BUSY_LIMIT:.0%}{spoilt}).{warning}",
        _verified(runs),
    )


def engine_cpu_s(run: Measured) -> float:
    """Return the CPU time of all engines of a run."""
    return sum(cpu for name, cpu in run.cpu_s.items() if name[:2] in ("pe", "de"))


def run_data(run: Measured) -> dict[str, Any]:
    """Return the data of a run that every experiment writes to its JSON."""
    return {
        "jct_s": run.jct_s,
        "busy": run.busy,
        "rejected": run.rejected,
        "cpu_s": run.cpu_s,
        "thread_cpu_s": run.client.thread_cpu_s,
        "storage_bytes": run.storage_bytes,
        "verified": run.client.verified,
        "wrong": run.client.wrong,
        "summary": run.client.replay.summary,
    }


def too_busy(runs: Iterable[_Run]) -> bool:
    """Return whether the machine was too busy for the links in any of ``runs``."""
    return _busiest(runs) > BUSY_LIMIT


def _busiest(runs: Iterable[_Run]) -> float:
    """Return the largest busy share of runs that use links; Oracle moves no bytes."""
    return max((run.busy for run in runs if run.mode.moves_bytes), default=0.0)


def _verified(runs: Sequence[Measured]) -> str:
    verified = sum(sum(run.client.verified.values()) for run in runs)
    wrong = sum(sum(run.client.wrong.values()) for run in runs)
    if verified:
        return f"{verified:,} Layer Blocks compared on arrival, {wrong or 'none'} wrong."
    servers = [run.client.replay.server for run in runs]
    again = sum(server.recomputed_tokens or 0 for server in servers if server is not None)
    return (
        "The checksum of every block read from storage is verified and bad blocks are recomputed: "
        f"{again:,} tokens."
    )
