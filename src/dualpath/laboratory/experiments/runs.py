"""One run on a lab: start engines of a mode, replay agents, meter every link, end everything."""

import shutil
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from dualpath.core.errors import EngineLostError
from dualpath.core.modes import Mode
from dualpath.laboratory.experiments.client import BEGIN, END, ClientResult, ClientTask
from dualpath.laboratory.experiments.janitor import start_janitor
from dualpath.laboratory.experiments.machine_load import BUSY_LIMIT, BusyMeter
from dualpath.laboratory.experiments.meters import LinkMeter, Sample
from dualpath.laboratory.experiments.node_process import NodeProcess, NodeProcesses
from dualpath.laboratory.experiments.workload import Window, write_histories, write_rounds
from dualpath.laboratory.lab.cluster import (
    LabState,
    LinkReport,
    lab_down,
    lab_head,
    lab_nodes,
    lab_up,
    link_reports,
    storage_url,
)
from dualpath.laboratory.lab.machine import lab_folder, prefix
from dualpath.laboratory.lab.settings import LabSettings
from dualpath.laboratory.workload.replay.options import ReplayOptions

#: Salts of a run's agents; the same in all runs of a lab, so that stored histories are theirs.
RUN_ID = "lab"
START_TIMEOUT_S = 300.0
_CLIENT = "client"


class Engines(Protocol):
    """A kind of engines for a lab.  ``verifies``: they tell at /metrics what they compared."""

    verifies: bool

    def start(self, state: LabState, processes: NodeProcesses, mode: Mode, storage: str) -> str:
        """Start them and their router; return the endpoint.  Engine processes bear node names."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One run.  ``busy`` is the share of the machine that was busy while agents ran.

    ``cpu_s`` by process, over the replay.  ``samples`` begin and end with the replay; their times
    are seconds since it began.  ``rejected`` counts runs that a busy machine spoilt before it.
    """

    mode: Mode
    client: ClientResult
    busy: float
    cpu_s: dict[str, float]
    samples: list[Sample]
    rejected: int = 0

    @property
    def jct_s(self) -> float:
        """Job completion time of all agents (§7.2)."""
        return self.client.replay.summary.jct_s

    @property
    def storage_bytes(self) -> int:
        """Bytes that all nodes read from storage."""
        first, last = self.samples[0].nodes, self.samples[-1].nodes
        return sum(last[name].snic - first[name].snic for name in first)

    def snic_use(self, bytes_per_s: float, begin: float = 0.25, end: float = 0.75) -> list[float]:
        """Return each node's storage rate between two shares of the run, relative to its link."""
        low = min(self.samples, key=lambda s: abs(s.time_s - begin * self.jct_s))
        high = min(self.samples, key=lambda s: abs(s.time_s - end * self.jct_s))
        passed_s = high.time_s - low.time_s
        return [
            (high.nodes[name].snic - low.nodes[name].snic) / passed_s / bytes_per_s
            for name in low.nodes
        ]

    def snic_balance(self, window_s: float) -> float:
        """Return mean max/avg of the nodes' storage reads over windows (Fig. 13)."""
        ratios = []
        for index in range(int(self.jct_s / window_s)):
            moved = self._moved(index * window_s, (index + 1) * window_s)
            if sum(moved) > 0:
                ratios.append(max(moved) / statistics.fmean(moved))
        return statistics.fmean(ratios) if ratios else 1.0

    def _moved(self, begin_s: float, end_s: float) -> list[int]:
        low = min(self.samples, key=lambda s: abs(s.time_s - begin_s))
        high = min(self.samples, key=lambda s: abs(s.time_s - end_s))
        return [high.nodes[name].snic - low.nodes[name].snic for name in low.nodes]


class LabRun:
    """A lab that is up, with agents' histories in its storage; a context manager.

    ``progress`` is told what happens.  Leaving removes the lab with everything in it; so does a
    janitor process if this one is killed.
    """

    def __init__(
        self,
        settings: LabSettings,
        engines: Engines,
        agents: Sequence[Window],
        progress: Callable[[str], None] = lambda text: None,
        *,
        busy_limit: float = BUSY_LIMIT,
        attempts: int = 3,
    ) -> None:
        self.settings = settings
        self._engines = engines
        self._agents = agents
        self._progress = progress
        self._busy_limit = busy_limit
        self._attempts = attempts
        self._state: LabState | None = None
        self._warm: set[bool] = set()
        self._objects = 0

    def __enter__(self) -> "LabRun":
        self._janitor = start_janitor(self.settings.name)
        try:
            self._state = lab_up(self.settings)
            self._work = lab_folder() / f"{prefix(self.settings.name)}work"
            self._work.mkdir()
            write_rounds(self._agents, self._trace)
            write_histories(self._agents, self._history_trace)
        except BaseException:
            self._take_down()
            raise
        self._progress(f"lab of {self.settings.shape} is up")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._take_down()

    @property
    def state(self) -> LabState:
        """The lab."""
        assert self._state is not None, "the rig is entered first"
        return self._state

    @property
    def links(self) -> tuple[LinkReport, ...]:
        """How its links are shaped, and by whom."""
        return link_reports(self.state)

    def run(self, mode: Mode, options: ReplayOptions) -> Measured:
        """Replay all agents in a mode and return what was measured.

        A run that uses links on a machine busier than the limit is repeated, at most ``attempts``
        times in all; the last is returned whatever it is.  Raises ``EngineLostError`` if a process
        or turn fails.
        """
        rejected = 0
        while True:
            storage = self._storage_with_histories(mode, options.seed)
            measured = self._once(mode, options, self._trace, storage)
            spoilt = mode.moves_bytes and measured.busy > self._busy_limit
            if not spoilt or rejected + 1 == self._attempts:
                return msgspec.structs.replace(measured, rejected=rejected)
            rejected += 1
            self._progress(f"{mode.value}: rejected, machine {measured.busy:.0%} busy")

    def _storage_with_histories(self, mode: Mode, seed: int) -> str:
        """Return a storage that holds the agents' histories and nothing else.

        On a file system they are computed once per kind of storage and linked for every run: a
        stored block never changes.  A server of objects has no links; there every run computes.
        """
        if not mode.moves_bytes or self.state.machine.s3_server is None:
            stored = self._folder("histories" if mode.moves_bytes else "histories-lengths")
            if mode.moves_bytes not in self._warm:
                self._store_histories(mode, seed, str(stored))
                self._warm.add(mode.moves_bytes)
            folder = self._folder("run")
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(stored, folder, copy_function=_link)
            return str(folder)
        self._objects += 1
        storage = storage_url(self.state, f"run-{self._objects}")
        self._store_histories(mode, seed, storage)
        return storage

    def _store_histories(self, mode: Mode, seed: int, storage: str) -> None:
        self._progress("storing the agents' histories")
        warm_mode = Mode.DUALPATH if mode.moves_bytes else mode
        self._once(warm_mode, ReplayOptions(seed=seed), self._history_trace, storage)

    def _once(self, mode: Mode, options: ReplayOptions, trace: Path, storage: str) -> Measured:
        logs = self._work / "logs"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir()
        with NodeProcesses(self.state, logs) as processes:
            endpoint = self._engines.start(self.state, processes, mode, storage)
            return self._replay(processes, mode, endpoint, options, trace)

    def _replay(
        self,
        processes: NodeProcesses,
        mode: Mode,
        endpoint: str,
        options: ReplayOptions,
        trace: Path,
    ) -> Measured:
        nodes = lab_nodes(self.state)
        task = ClientTask(
            endpoint=endpoint,
            engines=len(nodes),
            trace=str(trace),
            options=msgspec.structs.replace(options, run_id=RUN_ID),
            result=str(self._work / "result.json"),
            engine_metrics=self._engines.verifies,
            start_timeout_s=START_TIMEOUT_S,
        )
        task_file = self._work / "task.json"
        task_file.write_bytes(msgspec.json.encode(task))
        servers = processes.all
        client = processes.start_module(
            _CLIENT,
            lab_head(self.state),
            "dualpath.laboratory.experiments.client",
            [str(task_file)],
        )
        self._wait_for(processes, client, BEGIN, START_TIMEOUT_S)
        meter = LinkMeter(self.state, {p.name: p.pid for p in servers}, nodes)
        busy = BusyMeter()
        cpu_before = {p.name: p.cpu_s for p in (*servers, client)}
        meter.start()
        try:
            self._wait_for(processes, client, END, options.read_timeout_s * 10)
            share = busy.busy()
            cpu_s = {p.name: p.cpu_s - cpu_before[p.name] for p in (*servers, client)}
        finally:
            samples = meter.stop()
        if client.wait(START_TIMEOUT_S) != 0:
            raise EngineLostError(f"the client of the run failed:\n{client.log_tail()}")
        result = msgspec.json.decode(Path(task.result).read_bytes(), type=ClientResult)
        _refuse_failures(result)
        return Measured(
            mode=mode, client=result, busy=share, cpu_s=cpu_s, samples=_since_begin(samples)
        )

    def _wait_for(
        self, processes: NodeProcesses, client: NodeProcess, word: str, deadline_s: float
    ) -> None:
        def said() -> bool:
            return word in client.log.read_text(encoding="utf-8").splitlines()

        processes.wait_until(said, f"the client's {word!r}", deadline_s, may_end=client)

    def _folder(self, name: str) -> Path:
        return Path(self.state.machine.storage) / name

    @property
    def _trace(self) -> Path:
        return self._work / "agents.jsonl"

    @property
    def _history_trace(self) -> Path:
        return self._work / "histories.jsonl"

    def _take_down(self) -> None:
        try:
            removed = lab_down(self.settings.name)
            self._progress(f"lab removed: {removed}")
        finally:
            # After the removal: until then it would be needed if we were killed.
            self._janitor.kill()
            self._janitor.wait()


def _since_begin(samples: list[Sample]) -> list[Sample]:
    begin_s = samples[0].time_s
    return [msgspec.structs.replace(s, time_s=s.time_s - begin_s) for s in samples]


def _refuse_failures(result: ClientResult) -> None:
    wrong = sum(result.wrong.values())
    if wrong:
        raise EngineLostError(f"{wrong} Layer Blocks were wrong; this is a defect, keep the logs")
    if result.replay.failed:
        errors = [turn.error for turn in result.replay.turns if turn.error]
        raise EngineLostError(f"{len(errors)} turns failed, the first with: {errors[:1]}")


def _link(source: str, target: str) -> str:
    Path(target).hardlink_to(source)
    return target
