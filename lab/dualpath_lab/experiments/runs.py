"""Runs on a lab: start engines in a mode, replay agents, meter all links, end all processes."""

import shutil
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import msgspec

from dualpath.core.addresses import http_url
from dualpath.core.errors import EngineLostError
from dualpath.core.modes import Mode
from dualpath.workload.replay.client import ReplayOptions
from dualpath_lab.experiments.client import ClientResult, ClientTask
from dualpath_lab.experiments.engine_nodes import ROUTER_PORT
from dualpath_lab.experiments.machine_load import BUSY_LIMIT, repeat_while_busy
from dualpath_lab.experiments.metered_replay import Metered, replay_metered
from dualpath_lab.experiments.workload import Window, write_histories, write_rounds
from dualpath_lab.nodes.cluster import LabState, LinkReport, lab_head, link_reports, storage_url
from dualpath_lab.nodes.janitor import temporary_lab
from dualpath_lab.nodes.machine import lab_folder, prefix
from dualpath_lab.nodes.node_processes import NodeCommand, NodeProcesses
from dualpath_lab.nodes.settings import LabSettings

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
    """A run in a mode; ``rejected`` counts earlier attempts on a too busy machine."""

    mode: Mode
    rejected: int = 0


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
        busy_limit: float = BUSY_LIMIT,
        attempts: int = 3,
    ) -> None:
        self.settings = settings
        self._engines = engines
        self._agents = agents
        self._progress = progress
        self._warm = warm
        self._busy_limit = busy_limit
        self._attempts = attempts
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

    def run(self, mode: Mode, options: ReplayOptions, engines: Engines | None = None) -> Measured:
        """Replay all agents in a mode and return the measured run.

        A run that uses links on a machine busier than the limit is repeated, up to ``attempts``
        runs; the last one is returned in any case.  Raises ``EngineLostError`` if a process or
        turn fails.
        """
        chosen = engines or self._engines

        def once(rejected: int) -> Measured:
            storage = self._storage_with_histories(mode, options.seed, chosen)
            before = self._history_trace if self._warm and mode.moves_bytes else None
            metered = self._once(mode, options, self._trace, storage, chosen, before)
            return Measured(mode=mode, rejected=rejected, **msgspec.structs.asdict(metered))

        def spoilt(measured: Measured) -> bool:
            too_busy = mode.moves_bytes and measured.busy > self._busy_limit
            if too_busy:
                self._progress(
                    f"{mode.value}: machine {measured.busy:.0%} busy, too busy for shaped links"
                )
            return too_busy

        return repeat_while_busy(once, spoilt, self._attempts)

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


# ---------------------------------------------------------------------------------------- in turns
# Compared variants of a run, interleaved, so that changes of the machine affect all of them.
#
# Compared are the two runs of one round, which follow each other; reported is the median ratio over
# the rounds.


class Variant(msgspec.Struct, frozen=True):
    """One variant: its name, the mode, the engines."""

    name: str
    mode: Mode
    engines: Engines


Runs = Mapping[str, Sequence[Measured]]


def run_interleaved(
    lab_run: LabRun,
    variants: Sequence[Variant],
    repeat: int,
    options: ReplayOptions,
    progress: Callable[[str], None],
) -> dict[str, list[Measured]]:
    """Run all variants in each of ``repeat`` rounds; return the runs by the variant's name.

    Raises as ``LabRun.run``.
    """
    runs: dict[str, list[Measured]] = {variant.name: [] for variant in variants}
    for repetition in range(repeat):
        for variant in variants:
            measured = lab_run.run(variant.mode, options, variant.engines)
            runs[variant.name].append(measured)
            progress(
                f"{lab_run.settings.nodes} {repetition + 1}/{repeat} {variant.name}: "
                f"{measured.jct_s:.1f} s, machine {measured.busy:.0%} busy"
            )
    return runs


def paired_ratio(
    runs: Runs, name: str, base: str, of: Callable[[Measured], float] = lambda run: run.jct_s
) -> float:
    """Return the median, over rounds, of the ratio of one variant's run to another's."""
    pairs = zip(runs[name], runs[base], strict=True)
    return statistics.median(of(run) / of(other) for run, other in pairs)


# --------------------------------------------------------------------------------------------- job
# All runs of one cluster, which replayed the same agents in several modes.

#: The modes that load by both paths with the scheduler of §6; these have targets.
JUDGED = (Mode.DUALPATH, Mode.SPLIT)


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """All runs of one cluster."""

    lab: LabSettings
    links: tuple[LinkReport, ...]
    agents: Sequence[Window]
    runs: Mapping[Mode, Sequence[Measured]]

    def jct_s(self, mode: Mode) -> float | None:
        """Median over repetitions."""
        return self.median(mode, lambda run: run.jct_s)

    def median(self, mode: Mode, of: Callable[[Measured], float]) -> float | None:
        """Return the median of ``of`` over a mode's runs; None without runs."""
        runs = self.runs.get(mode)
        return statistics.median(of(run) for run in runs) if runs else None

    def typical(self, mode: Mode) -> Measured | None:
        """Return the run of median JCT, the later of two."""
        runs = sorted(self.runs.get(mode, ()), key=lambda run: run.jct_s)
        return runs[len(runs) // 2] if runs else None

    @property
    def ideal_ratio(self) -> float:
        """Ideal speed-up over Basic if only storage limits: all SNICs read instead of P of them."""
        return (self.lab.prefill + self.lab.decode) / self.lab.prefill

    @property
    def reading_share(self) -> float | None:
        """Time that all SNICs together need for the bytes, relative to Oracle's JCT."""
        oracle = self.jct_s(Mode.ORACLE)
        run = next(filter(None, map(self.typical, JUDGED)), None)
        if oracle is None or run is None:
            return None
        nodes = self.lab.prefill + self.lab.decode
        return run.storage_bytes / (nodes * self.lab.snic_bytes_per_s) / oracle


# --------------------------------------------------------------------------------------- run lines
# Lines of every report on lab runs: links, load of the machine, verification.


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
