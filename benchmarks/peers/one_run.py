"""One stack, one lab: store what agents had said before, then replay what they say next."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from benchmarks.peers.peer_stack import PROXY_PORT, PeerSettings, PeerStack

from dualpath.core.errors import EngineLostError
from dualpath.laboratory.experiments.client import BEGIN, ClientResult, ClientTask
from dualpath.laboratory.experiments.machine_load import BusyMeter
from dualpath.laboratory.experiments.meters import LinkMeter, Sample
from dualpath.laboratory.experiments.node_process import NodeProcess, NodeProcesses
from dualpath.laboratory.lab.cluster import LabState
from dualpath.laboratory.lab.machine import Node
from dualpath.laboratory.models.tiny import VOCABULARY_TOKENS
from dualpath.laboratory.workload.replay.options import ReplayOptions
from dualpath.laboratory.workload.replay.result import Distribution, Isolation, ReplayResult

_SHARED_MEMORY = Path("/dev/shm")
_START_S = 400.0
_RUN_S = 1800.0
_SETTLE_S = 60.0
_STILL_S = 2.0
_POLL_S = 0.05


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What one run measured; bytes are those of the measured replay alone, by node.

    ``stored_bytes`` is what lay in storage when it began; ``busy`` the share of all cores.
    """

    stack: str
    aggregated: bool
    jct_s: float
    ttft_s: Distribution | None
    tpot_s: Distribution | None
    prompt_tokens: int
    hit_tokens: int | None
    turns: int
    turns_failed: int
    snic_bytes: dict[str, int]
    cnic_in_bytes: dict[str, int]
    stored_bytes: int
    busy: float
    digests: dict[str, str]
    errors: list[str]


def run_stack(
    stack: PeerStack,
    settings: PeerSettings,
    state: LabState,
    trace: Path,
    folder: Path,
    *,
    engines: int,
) -> RunRecord:
    """Start a stack on a lab, replay and end it.

    ``engines``: how many register with DualPath's router; 0 for a peer.  Raises
    ``EngineLostError`` if a process ends or something takes too long.
    """
    nodes = (*settings.prefill, *settings.decode)
    before = _shared_files()
    with NodeProcesses(state, folder) as engine_group, NodeProcesses(state, folder) as tasks:
        run = _Run(engine_group, tasks, settings.head, trace, folder, engines)
        started = run.start(stack, settings)
        run.finish(run.client("store", turns=1))
        stored_bytes = settled_bytes(Path(settings.storage))
        measured = run.client("replay", turns=None)
        run.wait_for_begin(measured)
        meter = LinkMeter(state, {n.name: started[n.name].pid for n in nodes}, nodes)
        busy = BusyMeter()
        meter.start()
        try:
            run.finish(measured)
            share = busy.busy()
        finally:
            samples = meter.stop()
    # A peer that is ended leaves its shared memory, named by a random id.
    for file in _shared_files() - before:
        file.unlink(missing_ok=True)
    result = msgspec.json.decode((folder / "replay.json").read_bytes(), type=ClientResult).replay
    return _record(stack.name, settings, result, samples, stored_bytes, share)


def _shared_files() -> set[Path]:
    return {*_SHARED_MEMORY.glob("vllm_offload_*.mmap")}


class _Run:
    """The processes of a run: those that serve, and the tasks that end by themselves."""

    def __init__(
        self,
        serving: NodeProcesses,
        tasks: NodeProcesses,
        head: Node,
        trace: Path,
        folder: Path,
        engines: int,
    ) -> None:
        self._serving = serving
        self._tasks = tasks
        self._head = head
        self._trace = trace
        self._folder = folder
        self._engines = engines

    def start(self, stack: PeerStack, settings: PeerSettings) -> dict[str, NodeProcess]:
        """Start a stack and wait until it can be used; return its processes by name."""
        started: dict[str, NodeProcess] = {}
        waiting: list[str] = []
        for process in stack.processes(settings):
            started[process.name] = self._serving.start(
                process.name, process.node, process.argv, process.environment
            )
            if process.ready_url:
                waiting.append(process.ready_url)
        if waiting:
            module = "benchmarks.peers.wait_until_ready"
            arguments = (f"{_START_S:g}", *waiting)
            self.finish(self._tasks.start_module("wait", self._head, module, arguments))
        return started

    def client(self, name: str, turns: int | None) -> NodeProcess:
        """Start a replay of the first ``turns`` turns of every agent, None for all."""
        options = ReplayOptions(
            isolation=Isolation.NONE, max_turns=turns, vocab_size=VOCABULARY_TOKENS, label=name
        )
        task = ClientTask(
            endpoint=f"http://{self._head.address}:{PROXY_PORT}",
            engines=self._engines,
            trace=str(self._trace),
            options=options,
            result=str(self._folder / f"{name}.json"),
            engine_metrics=False,
            start_timeout_s=_START_S,
        )
        file = self._folder / f"{name}-task.json"
        file.write_bytes(msgspec.json.encode(task))
        module = "dualpath.laboratory.experiments.client"
        return self._tasks.start_module(name, self._head, module, (str(file),))

    def wait_for_begin(self, client: NodeProcess) -> None:
        """Return when the client's first agent starts."""
        self._wait(lambda: BEGIN in client.log.read_text(encoding="utf-8"), client)

    def finish(self, task: NodeProcess) -> None:
        """Wait for a task; raises ``EngineLostError`` if it failed."""
        self._wait(lambda: task.exit_code is not None, task)
        if task.exit_code:
            raise EngineLostError(f"{task.name} failed:\n{task.log_tail()}")

    def _wait(self, over: Callable[[], bool], task: NodeProcess) -> None:
        end_s = time.monotonic() + _RUN_S
        while not over():
            self._serving.check_alive()
            if time.monotonic() > end_s:
                raise EngineLostError(f"{task.name} took over {_RUN_S:g} s; see {task.log}")
            time.sleep(_POLL_S)


def settled_bytes(storage: Path) -> int:
    """Wait until writes are over and return the bytes of all files in storage."""
    end_s = time.monotonic() + _SETTLE_S
    size, still_since_s = -1, time.monotonic()
    while time.monotonic() < end_s and time.monotonic() - still_since_s < _STILL_S:
        now = sum(file.stat().st_size for file in storage.rglob("*") if file.is_file())
        if now != size:
            size, still_since_s = now, time.monotonic()
        time.sleep(_POLL_S * 4)
    return size


def _record(
    stack: str,
    settings: PeerSettings,
    result: ReplayResult,
    samples: Sequence[Sample],
    stored_bytes: int,
    busy: float,
) -> RunRecord:
    summary = result.summary
    first, last = samples[0].nodes, samples[-1].nodes
    return RunRecord(
        stack=stack,
        aggregated=settings.aggregated,
        jct_s=summary.jct_s,
        ttft_s=summary.ttft_s,
        tpot_s=summary.tpot_s,
        prompt_tokens=summary.prompt_tokens,
        hit_tokens=summary.hit_tokens,
        turns=summary.turns,
        turns_failed=summary.turns_failed,
        snic_bytes={name: last[name].snic - first[name].snic for name in first},
        cnic_in_bytes={name: last[name].cnic_in - first[name].cnic_in for name in first},
        stored_bytes=stored_bytes,
        busy=busy,
        digests={
            f"{turn.session_id}/{turn.turn}": turn.generated_digest or "failed"
            for turn in result.turns
        },
        errors=sorted({turn.error for turn in result.turns if turn.error}),
    )
