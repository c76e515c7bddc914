"""One run of a stack on a lab: store the agents' histories, then replay the measured turns."""

import time
from pathlib import Path

import msgspec

from dualpath.workload.replay.client import ReplayOptions
from dualpath.workload.replay.result import Distribution, Isolation, ToolDelays
from dualpath_lab.benchmarks.peers.peer_stack import PROXY_PORT, PeerSettings, PeerStack
from dualpath_lab.experiments.client import ClientTask
from dualpath_lab.experiments.metered_replay import Metered, replay_metered
from dualpath_lab.models.random_models import VOCABULARY_TOKENS
from dualpath_lab.nodes.cluster import LabState
from dualpath_lab.nodes.node_processes import NodeProcesses

_SHARED_MEMORY = Path("/dev/shm")
_START_S = 400.0
_RUN_S = 1800.0
_SETTLE_S = 60.0
_STABLE_S = 2.0
_POLL_S = 0.2


class RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Results of one run; bytes are those of the measured replay, by node.

    ``stored_bytes`` is the size of storage at its start, ``busy`` the utilization of all cores,
    ``cpu_s`` CPU seconds by process, which the oldest published runs lack.
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
    cpu_s: dict[str, float] = {}
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
    """Start a stack on a lab, replay the trace and stop the stack.

    ``engines`` is the number of engines that register with DualPath's router, 0 for a peer.  Raises
    ``EngineLostError`` if a process ends, ``DeadlineError`` if a step takes too long.
    """
    before = _shared_files()
    commands = stack.commands(settings)
    store = ClientTask(
        endpoint=f"http://{settings.head.address}:{PROXY_PORT}",
        engines=engines,
        ready_urls=tuple(command.ready_url for command in commands if command.ready_url),
        trace=str(trace),
        # The first turn is the agents' history.
        options=ReplayOptions(
            isolation=Isolation.NONE,
            tool_delays=ToolDelays.RECORDED,
            max_turns=1,
            vocab_size=VOCABULARY_TOKENS,
            label="store",
        ),
        engine_metrics=False,
        start_timeout_s=_START_S,
    )
    replay = msgspec.structs.replace(
        store,
        options=msgspec.structs.replace(store.options, max_turns=None, label="replay"),
    )
    with NodeProcesses(state, folder) as processes:
        for command in commands:
            processes.start(command)
        replay_metered(processes, state, "store", store, _RUN_S)
        stored_bytes = settled_bytes(Path(settings.storage))
        metered = replay_metered(processes, state, "replay", replay, _RUN_S)
    (folder / "replay.json").write_bytes(msgspec.json.encode(metered.client))
    # A stopped peer leaves its shared memory files, which have random names.
    for file in _shared_files() - before:
        file.unlink(missing_ok=True)
    return _record(stack.name, settings, metered, stored_bytes)


def _shared_files() -> set[Path]:
    return {*_SHARED_MEMORY.glob("vllm_offload_*.mmap")}


def settled_bytes(storage: Path) -> int:
    """Wait until storage stops growing and return the size of all its files."""
    end_s = time.monotonic() + _SETTLE_S
    size, stable_since_s = -1, time.monotonic()
    while time.monotonic() < end_s and time.monotonic() - stable_since_s < _STABLE_S:
        now = sum(file.stat().st_size for file in storage.rglob("*") if file.is_file())
        if now != size:
            size, stable_since_s = now, time.monotonic()
        time.sleep(_POLL_S)
    return size


def _record(stack: str, settings: PeerSettings, metered: Metered, stored_bytes: int) -> RunRecord:
    result = metered.client.replay
    summary = result.summary
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
        snic_bytes=metered.node_bytes("snic"),
        cnic_in_bytes=metered.node_bytes("cnic_in"),
        stored_bytes=stored_bytes,
        busy=metered.busy,
        cpu_s=metered.cpu_s,
        digests={
            f"{turn.session_id}/{turn.turn}": turn.generated_digest or "failed"
            for turn in result.turns
        },
        errors=sorted({turn.error for turn in result.turns if turn.error}),
    )
