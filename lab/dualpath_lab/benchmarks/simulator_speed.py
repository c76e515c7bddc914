"""CPU-seconds and memory of the simulator on one core, beside its limits.

Cells: the paper's largest cluster (§7.6); its 2P4D on both cores and, on the reference core, with a
DRAM tier; agents and nodes doubled together.  With ``--dynamo`` one trace is also replayed here and
in Dynamo's simulator, in the environment that ``peers/dynamo_simulator/set_up.sh`` makes.

Every run is made in a new child process on one core.  A first run with a few agents compiles; this
run, generating the workload and reading the trace are reported separately.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from dualpath.core.errors import ConfigError
from dualpath.core.modes import Mode
from dualpath.core.settings import Setting, Settings
from dualpath.workload.columns.agent_table import AgentTable
from dualpath.workload.columns.generator import DATASETS, generate_agents
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_sessions
from dualpath.workload.formats import read_trace
from dualpath_sim.catalog.costs import DEFAULT_GPU, load_model_costs
from dualpath_sim.catalog.load import load_cluster
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Measure,
    Page,
    Progress,
    RawData,
    Stage,
    one_stage,
)
from dualpath_sim.harness.numbers import Column, Numbers, key_results, number_table
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import Setup

CLUSTER, MODEL, DATASET = "paper-660b", "ds-v3.2", "64K"
MODE = Mode.DUALPATH
WARM_UP_AGENTS = 16
PEER = Path(__file__).parent / "peers" / "dynamo_simulator"
GB = 1e9


class SpeedSettings(Settings, frozen=True, kw_only=True):
    """Seed, repetitions and the peer."""

    seed: Annotated[int, Setting("of the trajectories", ge=0)] = 0
    repeat: Annotated[int, Setting("runs of each cell", ge=1)] = 3
    dynamo: Annotated[
        str,
        Setting("folder given to peers/dynamo_simulator/set_up.sh", metavar="DIR"),
    ] = ""
    trace: Annotated[
        str, Setting("rounds for the comparison with Dynamo; default: generated", metavar="FILE")
    ] = ""
    peer_agents: Annotated[int, Setting("agents of the comparison with Dynamo", ge=1)] = 512


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement; agents are those of ``trace``, a file of rounds, or generated."""

    prefill_nodes: int
    decode_nodes: int
    agents: int
    seed: int
    core: Literal["compiled", "reference"] = "compiled"
    dram_tier_bytes: float | None = None
    trace: str | None = None
    limit_cpu_s: float | None = None
    limit_bytes: float | None = None
    most_growth: float | None = None
    """Limit of the CPU time per turn relative to that of the cell before."""

    @property
    def title(self) -> str:
        """Cluster, agents and core."""
        tier = "" if self.dram_tier_bytes is None else f", DRAM tier of {self.dram_tier_bytes:g} B"
        nodes = f"{self.prefill_nodes}P{self.decode_nodes}D"
        return f"{nodes}, {self.agents:,} agents{tier}, {self.core}"


def _setup(case: Case) -> Setup:
    cluster = msgspec.structs.replace(
        load_cluster(CLUSTER),
        prefill_nodes=case.prefill_nodes,
        decode_nodes=case.decode_nodes,
        dram_tier_bytes=case.dram_tier_bytes,
    )
    return Setup(cluster=cluster, model=load_model_costs(MODEL, DEFAULT_GPU, cluster), mode=MODE)


def _agents(case: Case, agents: int) -> AgentTable:
    if case.trace is not None:
        sessions = read_trace(case.trace, limit=agents)
        return agents_from_sessions(sessions, WorkloadSettings(tool_delay_scale=1.0))
    return generate_agents(DATASETS[DATASET], agents, case.seed)


def peak_memory_bytes() -> int:
    """Return the peak memory of this process; ``ru_maxrss`` may be its parent's."""
    status = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def measure(case: Case) -> Numbers:
    """Measure in this process, after a warm-up run with a few agents."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    setup = _setup(case)
    started = time.process_time()
    simulate(setup, _agents(case, WARM_UP_AGENTS), core=case.core)
    warm_up_s = time.process_time() - started
    started = time.process_time()
    agents = _agents(case, case.agents)
    workload_s = time.process_time() - started
    started = time.process_time()
    result = simulate(setup, agents, core=case.core)
    cpu_s = time.process_time() - started
    if result.stopped or int(result.turns.finished_ns.min()) < 0:
        raise ConfigError(f"{case.title}: unfinished rounds, so the numbers are invalid")
    return {
        "turns": agents.rounds,
        "cpu_s": cpu_s,
        "turn_us": cpu_s / agents.rounds * 1e6,
        "turns_per_cpu_s": agents.rounds / cpu_s,
        "warm_up_cpu_s": warm_up_s,
        "workload_cpu_s": workload_s,
        "peak_gb": peak_memory_bytes() / GB,
        "jct_s": result.jct_s,
        "generated_tokens": int(agents.generated_tokens.sum()),
        "hit_share": float(agents.hit_tokens.sum() / agents.prompt_tokens.sum()),
    }


def in_child(case: Case) -> Numbers:
    """Measure in a new process with libraries that use one thread."""
    one_thread = {name: "1" for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, "-m", __spec__.name],
        input=msgspec.json.encode(case),
        stdout=subprocess.PIPE,
        env={**os.environ, **one_thread},
        check=True,
    )
    return msgspec.json.decode(done.stdout, type=Numbers)


def cases(seed: int) -> dict[str, Case]:
    """Return the cells: the largest cluster, 2P4D with both cores, growing clusters."""
    largest = Case(
        prefill_nodes=48, decode_nodes=96, agents=48 * 1024, seed=seed, limit_cpu_s=15,
        limit_bytes=4 * GB,
    )  # fmt: skip
    small = Case(prefill_nodes=2, decode_nodes=4, agents=2048, seed=seed, limit_cpu_s=0.5)
    reference = msgspec.structs.replace(small, core="reference", limit_cpu_s=30)
    growing = [
        Case(
            prefill_nodes=nodes, decode_nodes=2 * nodes, agents=1024 * nodes, seed=seed,
            most_growth=2,
        )
        for nodes in (3, 6, 12, 24)
    ]  # fmt: skip
    tiers = [
        msgspec.structs.replace(reference, dram_tier_bytes=size, limit_cpu_s=120)
        for size in (0.0, 200e9)
    ]
    largest = msgspec.structs.replace(largest, most_growth=2)
    return {case.title: case for case in (small, reference, *tiers, *growing, largest)}


def write_rounds(agents: AgentTable, path: Path) -> None:
    """Write agents as [append, generated] rounds, which all trace readers support."""
    with path.open("w", encoding="utf-8") as file:
        for agent, rounds in enumerate(rounds_of(agents)):
            file.write(json.dumps({"session_id": f"agent-{agent}", "rounds": rounds}) + "\n")


def rounds_of(agents: AgentTable) -> Iterator[list[list[int]]]:
    """Yield each agent's [append, generated] pairs."""
    for first, end in zip(agents.first_round[:-1], agents.first_round[1:], strict=True):
        prompts = agents.prompt_tokens[first:end].astype(np.int64)
        generated = agents.generated_tokens[first:end].astype(np.int64)
        contexts = np.concatenate([[0], (prompts + generated)[:-1]])
        yield np.stack([prompts - contexts, generated], axis=1).tolist()


def dynamo(directory: Path, trace: Path, *workers: str) -> Numbers:
    """Replay a converted trace in Dynamo's simulator."""
    command: list[str | Path] = [
        directory / "bin" / "python",
        "-I",
        PEER / "replay.py",
        trace,
        *workers,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found = json.loads(done.stdout)
    return {
        "turns": found["turns"],
        "cpu_s": found["cpu_s"],
        "turns_per_cpu_s": found["turns"] / found["cpu_s"],
        "workload_cpu_s": found["read_cpu_s"],
        "peak_gb": found["peak_bytes"] / GB,
        "jct_s": found["jct_s"],
        "generated_tokens": found["generated_tokens"],
        "hit_share": found["hit_rate"],
    }


Runner = Callable[[], Numbers]
PEER_CELLS = "the same trace: "


@contextmanager
def _beside_dynamo(settings: SpeedSettings) -> Iterator[Measure[str, Numbers]]:
    """Replay one trace in both simulators."""
    case = Case(
        prefill_nodes=2, decode_nodes=4, agents=settings.peer_agents, seed=settings.seed,
        trace=settings.trace or None,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trace = Path(settings.trace or folder / "rounds.jsonl")
        if not settings.trace:
            write_rounds(_agents(case, case.agents), trace)
            case = msgspec.structs.replace(case, trace=str(trace))
        converter: list[str | Path] = [sys.executable, PEER / "rounds_to_dynamo.py", trace]
        delta, cumulative = folder / "delta.jsonl", folder / "cumulative.jsonl"
        subprocess.run([*converter, delta], stdout=sys.stderr, check=True)
        subprocess.run([*converter, cumulative, "--cumulative"], stdout=sys.stderr, check=True)
        gpus, directory = _setup(case).cluster.gpus_per_node, Path(settings.dynamo)
        prefill, decode = case.prefill_nodes * gpus, case.decode_nodes * gpus
        split = ("--prefill-workers", str(prefill), "--decode-workers", str(decode))
        runners: dict[str, Runner] = {
            "compiled": lambda: in_child(case),
            "reference": lambda: in_child(msgspec.structs.replace(case, core="reference")),
            "aggregated": lambda: dynamo(directory, delta, "--workers", str(prefill + decode)),
            "disaggregated": lambda: dynamo(directory, cumulative, *split),
        }
        yield lambda which, number: runners[which]()


def _stages(settings: SpeedSettings, progress: Progress) -> Iterator[Stage[Any, Numbers]]:
    yield from one_stage(cases(settings.seed), lambda case, number: in_child(case))
    if settings.dynamo:
        names = {
            "dualpath, compiled core": "compiled",
            "dualpath, reference core": "reference",
            "Dynamo, aggregated workers": "aggregated",
            "Dynamo, prefill and decode workers": "disaggregated",
        }
        cells = {PEER_CELLS + name: which for name, which in names.items()}
        yield Stage(cells, lambda: _beside_dynamo(settings))


_COLUMNS = [
    Column("turns", "turns", "{:,.0f}"),
    Column("CPU-s", "cpu_s", tolerance=0.15),
    Column("peak GB", "peak_gb", of=max),
    Column("turns per CPU-s", "turns_per_cpu_s", "{:,.0f}"),
    Column("CPU-µs per turn", "turn_us"),
    Column("hit rate", "hit_share", "{:.1%}"),
    Column("first run, CPU-s", "warm_up_cpu_s"),
    Column("workload, CPU-s", "workload_cpu_s"),
    Column("JCT, s", "jct_s", "{:.0f}", tolerance=0.0, any_machine=True),
]


def draw(raw: RawData[SpeedSettings, Numbers]) -> Page:
    """Draw CPU time and memory beside their limits."""
    table = number_table(raw, "One core", _COLUMNS, "setting")
    return Page(
        settings=(
            f"{MODEL} on {CLUSTER}, mode {MODE}, generated {DATASET} trajectories, seed "
            f"{raw.settings.seed}.",
        ),
        tables=(table,),
        results=(*_limits(raw), *key_results(raw, _COLUMNS)),
    )


def _limits(raw: RawData[SpeedSettings, Numbers]) -> Iterator[KeyResult]:
    before_us: float | None = None
    for name, case in cases(raw.settings.seed).items():
        if not raw.of(name):
            continue
        cpu_s, peak_gb, turn_us = (
            raw.median(name, lambda one, key=key: one[key])  # type: ignore[misc]
            for key in ("cpu_s", "peak_gb", "turn_us")
        )
        if case.limit_cpu_s is not None:
            yield KeyResult(f"{name}: CPU-s", cpu_s, case.limit_cpu_s, at_least=False)
        if case.limit_bytes is not None:
            yield KeyResult(f"{name}: peak GB", peak_gb, case.limit_bytes / GB, at_least=False)
        if case.most_growth is not None and turn_us is not None:
            if before_us is not None:
                what = f"{name}: CPU time per turn relative to half the size"
                yield KeyResult(what, turn_us / before_us, case.most_growth, at_least=False)
            before_us = turn_us


SIMULATOR_SPEED = Experiment(
    name="simulator-speed",
    title="CPU time and memory of the simulator",
    settings=SpeedSettings(),
    result=Numbers,
    stages=_stages,
    draw=draw,
    summary=lambda found: f"{found['cpu_s']:.2f} CPU-s",
)

if __name__ == "__main__":
    chosen = msgspec.json.decode(sys.stdin.buffer.read(), type=Case)
    sys.stdout.buffer.write(msgspec.json.encode(measure(chosen)))
