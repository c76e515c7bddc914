"""Runs on a lab: start engines in a mode, replay agents, meter all links, end all processes."""

import shutil
import statistics
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from dualpath.core.addresses import http_url
from dualpath.core.errors import EngineLostError
from dualpath.core.modes import Mode
from dualpath.report.model import Series
from dualpath.workload.replay.client import ReplayOptions
from dualpath.workload.replay.result import Summary
from dualpath_lab.experiments.client import ClientResult, ClientTask
from dualpath_lab.experiments.engine_nodes import ROUTER_PORT
from dualpath_lab.experiments.machine_load import BUSY_LIMIT
from dualpath_lab.experiments.metered_replay import Metered, replay_metered
from dualpath_lab.experiments.workload import Window, write_histories, write_rounds
from dualpath_lab.nodes.cluster import LabState, LinkReport, lab_head, link_reports, storage_url
from dualpath_lab.nodes.janitor import temporary_lab
from dualpath_lab.nodes.machine import lab_folder, prefix
from dualpath_lab.nodes.node_processes import NodeCommand, NodeProcesses
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.evaluation.runs import EndRule
from dualpath_sim.harness.experiment import RawData

#: Cache salt of all runs' agents; equal in all runs of a lab, so that they share stored histories.
RUN_ID = "lab"
START_TIMEOUT_S = 300.0


class Engines(Protocol):
    """A kind of engines for a lab.  ``verifies``: they report verified blocks at /metrics."""

    verifies: bool

    def stored_kind(self, mode: Mode) -> str:
        """Return a folder name for the blocks they store; kinds with equal names share blocks."""

    def commands(self, state: LabState, mode: Mode, storage: str) -> Sequence[NodeCommand]:
        """Return the router, at ``ROUTER_PORT`` of the head node, then the engines of all nodes."""


class Measured(Metered, frozen=True, kw_only=True):
    """A run in a mode."""

    mode: Mode


class LabRun:
    """A lab with agents' histories in its storage; a context manager.

    ``engines`` is the default of ``run``.  ``warm``: before a run is measured, every history is
    requested once, so that engines cache it in DRAM.

    ``progress`` is called with progress messages.  The lab is removed at the end, as by
    ``temporary_lab``.
    """

    def __init__(
        self,
        settings: LabSettings,
        engines: Engines,
        agents: Sequence[Window],
        progress: Callable[[str], None] = lambda text: None,
        *,
        warm: bool = False,
    ) -> None:
        self.settings = settings
        self._engines = engines
        self._agents = agents
        self._progress = progress
        self._warm = warm
        self._state: LabState | None = None
        self._stored: set[str] = set()
        self._objects = 0

    def __enter__(self) -> "LabRun":
        with ExitStack() as stack:
            self._state = stack.enter_context(temporary_lab(self.settings, self._progress))
            self._work = lab_folder() / f"{prefix(self.settings.name)}work"
            self._work.mkdir()
            write_rounds(self._agents, self._trace)
            write_histories(self._agents, self._history_trace)
            self._lab = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._lab.close()

    @property
    def state(self) -> LabState:
        """The lab."""
        assert self._state is not None, "use LabRun as a context manager"
        return self._state

    @property
    def links(self) -> tuple[LinkReport, ...]:
        """How its links are shaped."""
        return link_reports(self.state)

    def run(
        self,
        mode: Mode,
        options: ReplayOptions,
        engines: Engines | None = None,
        *,
        end_rule: EndRule | None = None,
        longest_s: float = 0.0,
    ) -> Measured:
        """Replay agents in a mode and return the measured run; see ``ClientTask`` for its end.

        Raises ``EngineLostError`` if a process or turn fails.
        """
        chosen = engines or self._engines
        storage = self._storage_with_histories(mode, options.seed, chosen)
        before = self._history_trace if self._warm and mode.moves_bytes else None
        metered = self._once(
            *(mode, options, self._trace, storage, chosen, before), end_rule, longest_s
        )
        return Measured(mode=mode, **msgspec.structs.asdict(metered))

    def _storage_with_histories(self, mode: Mode, seed: int, engines: Engines) -> str:
        """Return a storage with the agents' histories and nothing else.

        On a file system they are computed once per kind of blocks and hard-linked for each run, as
        stored blocks never change.  Object storage has no links: there each run computes them.
        """
        if not mode.moves_bytes or self.state.machine.s3_server is None:
            kind = engines.stored_kind(mode)
            stored = self._folder(f"histories-{kind}")
            if kind not in self._stored:
                self._store_histories(mode, seed, str(stored), engines)
                self._stored.add(kind)
            folder = self._folder("run")
            shutil.rmtree(folder, ignore_errors=True)
            if stored.exists():
                shutil.copytree(stored, folder, copy_function=_link)
            else:
                folder.mkdir()
            return str(folder)
        self._objects += 1
        storage = storage_url(self.state, f"run-{self._objects}")
        self._store_histories(mode, seed, storage, engines)
        return storage

    def _store_histories(self, mode: Mode, seed: int, storage: str, engines: Engines) -> None:
        if not any(window.history_tokens for window in self._agents):
            return
        self._progress("storing the agents' histories")
        storing = Mode.DUALPATH if mode.moves_bytes else mode
        self._once(storing, ReplayOptions(seed=seed), self._history_trace, storage, engines)

    def _once(
        self,
        mode: Mode,
        options: ReplayOptions,
        trace: Path,
        storage: str,
        engines: Engines,
        before: Path | None = None,
        end_rule: EndRule | None = None,
        longest_s: float = 0.0,
    ) -> Metered:
        logs = self._work / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        commands = engines.commands(self.state, mode, storage)
        task = ClientTask(
            endpoint=http_url(lab_head(self.state).address, ROUTER_PORT),
            engines=len(commands) - 1,
            trace=str(trace),
            before=str(before) if before else "",
            options=msgspec.structs.replace(options, run_id=RUN_ID),
            engine_metrics=engines.verifies,
            start_timeout_s=START_TIMEOUT_S,
            end_rule=end_rule,
            longest_s=longest_s,
        )
        with NodeProcesses(self.state, logs) as processes:
            for command in commands:
                processes.start(command)
            deadline_s = options.read_timeout_s * 10
            metered = replay_metered(processes, self.state, "client", task, deadline_s)
        _refuse_failures(metered.client)
        return metered

    def _folder(self, name: str) -> Path:
        return Path(self.state.machine.storage) / name

    @property
    def _trace(self) -> Path:
        return self._work / "agents.jsonl"

    @property
    def _history_trace(self) -> Path:
        return self._work / "histories.jsonl"


def _refuse_failures(result: ClientResult) -> None:
    wrong = sum(result.wrong.values())
    if wrong:
        raise EngineLostError(
            f"{wrong} Layer Blocks were wrong; this is a defect: save the logs and report it"
        )
    if result.replay.failed:
        errors = [turn.error for turn in result.replay.turns if turn.error]
        raise EngineLostError(f"{len(errors)} turns failed, the first with: {errors[:1]}")


def _link(source: str, target: str) -> str:
    Path(target).hardlink_to(source)
    return target


# ------------------------------------------------------------------------------------------ result
# What is recorded of a run on a lab, and lines about all runs of a report.

#: The modes that load by both paths with the scheduler of §6; these have targets.
JUDGED = (Mode.DUALPATH, Mode.SPLIT)
#: The modes for which the rates of the links over time are drawn.
DRAWN = (Mode.BASIC, *JUDGED)
#: Length of the windows for the balance of storage NICs and for plotted rates, and the minimum
#: number of them in a run.
WINDOW_S, _LEAST_WINDOWS = 1.0, 8


class LabResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a run on a lab.

    ``busy`` is the busy share of the machine, ``cpu_s`` and ``thread_cpu_s`` have CPU seconds by
    process and by thread of the engines; ``verified`` and ``wrong`` count Layer Blocks by place.
    ``snic_use`` is each storage NIC's rate in the middle half of the run, relative to its link;
    ``snic_balance`` is max/avg over windows.  ``cnic_out_bytes`` and ``cnic_in_bytes`` are by node,
    ``rails`` has (out, in) bytes of each of its CNICs.  ``rates`` in MB/s over time, by link.
    Results that were published in an older format lack what has a default.
    """

    mode: Mode
    jct_s: float
    busy: float
    cpu_s: dict[str, float] = {}
    thread_cpu_s: dict[str, float] = {}
    storage_bytes: int = 0
    verified: dict[str, int] = {}
    wrong: dict[str, int] = {}
    summary: Summary | None = None
    recomputed_tokens: int = 0
    snic_balance: float = 1.0
    snic_use: tuple[float, ...] = ()
    cnic_out_bytes: dict[str, int] = {}
    cnic_in_bytes: dict[str, int] = {}
    rails: dict[str, tuple[tuple[int, int], ...]] = {}
    rates: dict[str, tuple[Series, ...]] = {}
    links: tuple[LinkReport, ...] = ()

    @property
    def engine_cpu_s(self) -> float:
        """CPU time of all engines."""
        return sum(cpu for name, cpu in self.cpu_s.items() if name[:2] in ("pe", "de"))


def lab_result(run: Measured, lab: LabSettings, links: tuple[LinkReport, ...]) -> LabResult:
    """Reduce a run to its result."""
    width_s = min(WINDOW_S, run.jct_s / _LEAST_WINDOWS)
    first, last = run.samples[0].nodes, run.samples[-1].nodes
    server = run.client.replay.server
    drawn = {"snic": "storage reads", "cnic_in": "CNIC in"} if run.mode in DRAWN else {}
    return LabResult(
        mode=run.mode,
        jct_s=run.jct_s,
        busy=run.busy,
        cpu_s=run.cpu_s,
        thread_cpu_s=run.client.thread_cpu_s,
        storage_bytes=run.storage_bytes,
        verified=run.client.verified,
        wrong=run.client.wrong,
        summary=run.client.replay.summary,
        recomputed_tokens=(server.recomputed_tokens or 0) if server is not None else 0,
        snic_balance=run.snic_balance(width_s),
        snic_use=tuple(run.snic_use(lab.snic_bytes_per_s)),
        cnic_out_bytes=run.node_bytes("cnic_out"),
        cnic_in_bytes=run.node_bytes("cnic_in"),
        rails={
            node: tuple(
                (after[0] - before[0], after[1] - before[1])
                for before, after in zip(first[node].rails, last[node].rails, strict=True)
            )
            for node in first
        },
        rates={
            title: merged_by_role([rate_series(run, node, count, width_s) for node in first])
            for count, title in drawn.items()
        },
        links=links,
    )


def rate_series(run: Measured, node: str, count: str, width_s: float) -> Series:
    """Return a node's rate in MB/s over windows of a run; ``count`` names a field of NodeBytes."""
    x: list[float] = []
    y: list[float | None] = []
    begin = run.samples[0]
    for sample in run.samples:
        passed_s = sample.time_s - begin.time_s
        if passed_s < width_s:
            continue
        moved: int = getattr(sample.nodes[node], count) - getattr(begin.nodes[node], count)
        x.append((sample.time_s + begin.time_s) / 2)
        y.append(moved / passed_s / 1e6)
        begin = sample
    return Series(node, tuple(x), tuple(y))


#: More nodes than this are drawn as the mean and the range of each role.
_MOST_NODES = 4


def merged_by_role(nodes: Sequence[Series]) -> tuple[Series, ...]:
    """Return the lines of few nodes unchanged, those of many merged to one per role.

    Nodes are named as in a lab, like ``pe0`` or ``de1``, and all have the same ``x``.
    """
    if len(nodes) <= _MOST_NODES:
        return tuple(nodes)
    roles = {"PEs": "pe", "DEs": "de"}
    lines = {role: [n for n in nodes if n.name.startswith(name)] for role, name in roles.items()}
    return tuple(_mean(f"mean of {len(of)} {role}", of) for role, of in lines.items() if of)


def _mean(name: str, nodes: Sequence[Series]) -> Series:
    known = [[y for y in at if y is not None] for at in zip(*(n.y for n in nodes), strict=True)]
    return Series(
        name,
        nodes[0].x,
        tuple(statistics.fmean(at) if at else None for at in known),
        low=tuple(min(at, default=None) for at in known),
        high=tuple(max(at, default=None) for at in known),
    )


class _Busy(Protocol):
    @property
    def mode(self) -> Mode: ...

    @property
    def busy(self) -> float: ...


def link_lines(results: Iterable[LabResult]) -> tuple[str, ...]:
    """Describe the rate of each kind of link and how it is shaped, if that is recorded."""
    links = next((result.links for result in results if result.links), ())
    found = "; ".join(
        f"{link.link} {link.bytes_per_s / 1e6:g} MB/s ({link.how if link.shaped else 'NOT SHAPED'})"
        for link in links
    )
    return (f"Links per node: {found}.",) if found else ()


def load_lines(raw: RawData[Any, Any], results: Sequence[LabResult]) -> tuple[str, ...]:
    """Describe the load of the machine and the number of verified blocks."""
    spoilt = f", {raw.rejected} spoilt runs repeated" if raw.rejected else ""
    warning = " TOO BUSY: links may not have held their rates." if too_busy(results) else ""
    return (
        f"Machine at most {_busiest(results):.0%} busy in a run that uses links (limit "
        f"{BUSY_LIMIT:.0%}{spoilt}).{warning}",
        _verified(results),
    )


def too_busy(results: Iterable[_Busy]) -> bool:
    """Return whether the machine was too busy for the links in any run."""
    return _busiest(results) > BUSY_LIMIT


def _busiest(results: Iterable[_Busy]) -> float:
    """Return the largest busy share of runs that use links; Oracle moves no bytes."""
    return max((result.busy for result in results if result.mode.moves_bytes), default=0.0)


def _verified(results: Sequence[LabResult]) -> str:
    verified = sum(sum(result.verified.values()) for result in results)
    wrong = sum(sum(result.wrong.values()) for result in results)
    if verified:
        return f"{verified:,} Layer Blocks compared on arrival, {wrong or 'none'} wrong."
    again = sum(result.recomputed_tokens for result in results)
    return (
        "The checksum of every block read from storage is verified and bad blocks are recomputed: "
        f"{again:,} tokens."
    )
