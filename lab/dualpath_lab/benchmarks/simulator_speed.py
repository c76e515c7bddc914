"""CPU-seconds and memory of the simulator on one core, beside its limits.

Run: ``python -m dualpath_lab.benchmarks.simulator_speed [scale] [small] [scaling] [peer] [--dynamo
DIRECTORY]``; without names every part runs.  ``scale`` is the paper's largest cluster (§7.6),
``small`` its 2P4D on both cores and, on the reference core, with a DRAM tier, ``scaling`` doubles
agents and nodes together, ``peer`` replays one trace file here and in Dynamo's simulator, in the
environment that ``peers/dynamo_simulator/set_up.sh`` makes.

Every figure is measured in a new child process on one core.  A first run with a few agents
compiles; this run, generating the workload and reading the trace are reported separately.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from dualpath import __version__
from dualpath.core.modes import Mode
from dualpath.node.machine import this_machine
from dualpath.report import markdown
from dualpath.report.model import Table
from dualpath.workload.columns.agent_table import AgentTable
from dualpath.workload.columns.generator import DATASETS, generate_agents
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_sessions
from dualpath.workload.formats import read_trace
from dualpath_sim.catalog.costs import DEFAULT_GPU, load_model_costs
from dualpath_sim.catalog.load import load_cluster
from dualpath_sim.simulator.run import simulate
from dualpath_sim.simulator.settings import Setup

CLUSTER, MODEL, DATASET = "paper-660b", "ds-v3.2", "64K"
MODE = Mode.DUALPATH
WARM_UP_AGENTS = 16
PARTS = ("scale", "small", "scaling", "peer")
PEER = Path(__file__).parent / "peers" / "dynamo_simulator"
GB = 1e9

CASES_HEAD = (
    *("setting", "turns", "CPU-s", "limit", "peak GB", "limit", "turns per CPU-s"),
    *("first run, CPU-s", "workload, CPU-s", "JCT, s"),
)
PEER_HEAD = (
    *("simulator", "turns", "tokens generated", "hit rate", "CPU-s", "turns per CPU-s"),
    *("peak GB", "reading, CPU-s", "JCT, s"),
)


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement; agents are those of ``trace``, a file of rounds, or generated."""

    prefill_nodes: int
    decode_nodes: int
    agents: int
    seed: int
    repeats: int = 1
    core: Literal["compiled", "reference"] = "compiled"
    dram_tier_bytes: float | None = None
    trace: str | None = None
    limit_cpu_s: float | None = None
    limit_bytes: float | None = None

    @property
    def title(self) -> str:
        """Cluster, agents and core."""
        tier = "" if self.dram_tier_bytes is None else f", DRAM tier of {self.dram_tier_bytes:g} B"
        nodes = f"{self.prefill_nodes}P{self.decode_nodes}D"
        return f"{nodes}, {self.agents:,} agents{tier}, {self.core}"


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a child process; ``cpu_s`` has one value per repetition."""

    turns: int
    cpu_s: list[float]
    warm_up_cpu_s: float
    workload_cpu_s: float
    peak_bytes: int
    jct_s: float
    generated_tokens: int
    hit_rate: float

    @property
    def median_cpu_s(self) -> float:
        """Median of the repetitions."""
        return statistics.median(self.cpu_s)

    @property
    def turns_per_cpu_s(self) -> float:
        """Turns per CPU-second, by the median."""
        return self.turns / self.median_cpu_s


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


def measure(case: Case) -> Measured:
    """Measure in this process, after a warm-up run with a few agents."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    setup = _setup(case)
    started = time.process_time()
    simulate(setup, _agents(case, WARM_UP_AGENTS), core=case.core)
    warm_up_s = time.process_time() - started
    started = time.process_time()
    agents = _agents(case, case.agents)
    workload_s = time.process_time() - started
    cpu_s: list[float] = []
    for _ in range(case.repeats):
        started = time.process_time()
        result = simulate(setup, agents, core=case.core)
        cpu_s.append(time.process_time() - started)
        jct_s = result.jct_s
        if result.stopped or int(result.turns.finished_ns.min()) < 0:
            raise SystemExit(f"{case.title}: unfinished rounds, so the figure is invalid")
        # Otherwise the memory of two results would be counted.
        del result
    return Measured(
        turns=agents.rounds,
        cpu_s=cpu_s,
        warm_up_cpu_s=warm_up_s,
        workload_cpu_s=workload_s,
        peak_bytes=peak_memory_bytes(),
        jct_s=jct_s,
        generated_tokens=int(agents.generated_tokens.sum()),
        hit_rate=float(agents.hit_tokens.sum() / agents.prompt_tokens.sum()),
    )


def in_child(case: Case) -> Measured:
    """Measure in a new process with libraries that use one thread."""
    one_thread = {name: "1" for name in ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS")}
    done = subprocess.run(
        [sys.executable, __file__, "--child"],
        input=msgspec.json.encode(case),
        stdout=subprocess.PIPE,
        env={**os.environ, **one_thread},
        check=True,
    )
    print(f"done: {case.title}", file=sys.stderr)
    return msgspec.json.decode(done.stdout, type=Measured)


def against(value: float, limit: float | None, form: str) -> str:
    """Return a limit and whether the value is within it."""
    if limit is None:
        return "-"
    return f"{limit:{form}} {'met' if value <= limit else 'EXCEEDED'}"


def cases_table(cases: Sequence[Case]) -> str:
    """Measure cases and return their table."""
    rows = []
    for case in cases:
        found = in_child(case)
        peak_gb = found.peak_bytes / GB
        limit_gb = None if case.limit_bytes is None else case.limit_bytes / GB
        rows.append(
            (
                case.title,
                f"{found.turns:,}",
                f"{found.median_cpu_s:.2f}",
                against(found.median_cpu_s, case.limit_cpu_s, "g"),
                f"{peak_gb:.2f}",
                against(peak_gb, limit_gb, "g"),
                f"{found.turns_per_cpu_s:,.0f}",
                f"{found.warm_up_cpu_s:.2f}",
                f"{found.workload_cpu_s:.2f}",
                f"{found.jct_s:.0f}",
            )
        )
    return markdown.table(Table("", CASES_HEAD, tuple(rows)))


def scale_cases(seed: int, repeats: int) -> list[Case]:
    """Return the largest cluster of the paper: 1,152 GPUs."""
    return [
        Case(
            prefill_nodes=48,
            decode_nodes=96,
            agents=48 * 1024,
            seed=seed,
            repeats=repeats,
            limit_cpu_s=15,
            limit_bytes=4 * GB,
        )
    ]


def small_cases(seed: int, repeats: int) -> list[Case]:
    """Return 2P4D with both cores, on the reference core with a DRAM tier as well."""
    case = Case(
        prefill_nodes=2, decode_nodes=4, agents=2048, seed=seed, repeats=repeats, limit_cpu_s=0.5
    )
    reference = msgspec.structs.replace(case, core="reference", repeats=1, limit_cpu_s=30)
    tiers = [
        msgspec.structs.replace(reference, dram_tier_bytes=size, limit_cpu_s=120)
        for size in (0.0, 200e9)
    ]
    return [case, reference, *tiers]


def scaling_table(seed: int, repeats: int) -> str:
    """Measure clusters with doubled agents and nodes, up to the largest one."""
    rows: list[tuple[str, ...]] = []
    before: float | None = None
    for prefill_nodes in (3, 6, 12, 24, 48):
        case = Case(
            prefill_nodes=prefill_nodes,
            decode_nodes=2 * prefill_nodes,
            agents=1024 * prefill_nodes,
            seed=seed,
            repeats=repeats,
        )
        found = in_child(case)
        turn_us = found.median_cpu_s / found.turns * 1e6
        ratio = None if before is None else turn_us / before
        before = turn_us
        cells = ("-", "-") if ratio is None else (f"{ratio:.2f}", against(ratio, 2, "g"))
        rows.append((case.title, f"{found.turns:,}", f"{turn_us:.2f}", *cells))
    head = ("setting", "turns", "CPU-µs per turn", "relative to the row above", "limit")
    return markdown.table(Table("", head, tuple(rows)))


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


def dynamo(directory: Path, trace: Path, *workers: str) -> Measured:
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
    found["cpu_s"] = [found["cpu_s"]]
    found |= {"workload_cpu_s": found.pop("read_cpu_s"), "warm_up_cpu_s": 0.0}
    return msgspec.convert(found, Measured)


def peer_table(case: Case, directory: Path, repeats: int, folder: Path) -> str:
    """Replay one trace in both simulators, interleaved."""
    trace = Path(case.trace) if case.trace else folder / "rounds.jsonl"
    if not case.trace:
        write_rounds(_agents(case, case.agents), trace)
        case = msgspec.structs.replace(case, trace=str(trace))
    converter: list[str | Path] = [sys.executable, PEER / "rounds_to_dynamo.py", trace]
    delta, cumulative = folder / "delta.jsonl", folder / "cumulative.jsonl"
    subprocess.run([*converter, delta], stdout=sys.stderr, check=True)
    subprocess.run([*converter, cumulative, "--cumulative"], stdout=sys.stderr, check=True)
    gpus = _setup(case).cluster.gpus_per_node
    prefill, decode = case.prefill_nodes * gpus, case.decode_nodes * gpus
    split = ("--prefill-workers", str(prefill), "--decode-workers", str(decode))
    reference = msgspec.structs.replace(case, core="reference")
    runs: dict[str, Callable[[], Measured]] = {
        "dualpath, compiled core": lambda: in_child(case),
        "dualpath, reference core": lambda: in_child(reference),
        f"Dynamo, {prefill + decode} aggregated workers": lambda: dynamo(
            directory, delta, "--workers", str(prefill + decode)
        ),
        f"Dynamo, {prefill} prefill + {decode} decode workers": lambda: dynamo(
            directory, cumulative, *split
        ),
    }
    found: dict[str, list[Measured]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            found[name].append(run())
    rows = tuple(_peer_row(name, measured) for name, measured in found.items())
    return markdown.table(Table("", PEER_HEAD, rows))


def _peer_row(name: str, measured: Sequence[Measured]) -> tuple[str, ...]:
    first = measured[0]
    cpu_s = statistics.median(one.median_cpu_s for one in measured)
    return (
        name,
        f"{first.turns:,}",
        f"{first.generated_tokens:,}",
        f"{first.hit_rate:.1%}",
        f"{cpu_s:.2f}",
        f"{first.turns / cpu_s:,.0f}",
        f"{max(one.peak_bytes for one in measured) / GB:.2f}",
        f"{statistics.median(one.workload_cpu_s for one in measured):.2f}",
        f"{first.jct_s:.0f}",
    )


def heading(seed: int, repeats: int) -> str:
    """Return setting, seed and machine in one paragraph."""
    machine = this_machine()
    return (
        f"dualpath {__version__}, Python {machine.python}, {machine.cpu_count} cores of "
        f"{machine.cpu_model}, {machine.memory_bytes / GB:.0f} GB, one core used. "
        f"{MODEL} on {CLUSTER}, mode {MODE}, generated {DATASET} trajectories, seed {seed}, "
        f"median of {repeats}."
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="part", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dynamo", type=Path, help="directory given to set_up.sh")
    parser.add_argument("--trace", type=Path, help="rounds for the peer part; default: generated")
    parser.add_argument("--peer-agents", type=int, default=512)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"unknown parts {', '.join(sorted(unknown))}; known are {', '.join(PARTS)}")
    if "peer" in arguments.parts and arguments.dynamo is None:
        parser.error("peer needs --dynamo DIRECTORY; make it with peers/dynamo_simulator/set_up.sh")
    return arguments


def main() -> None:
    arguments = parsed()
    if arguments.child:
        case = msgspec.json.decode(sys.stdin.buffer.read(), type=Case)
        sys.stdout.buffer.write(msgspec.json.encode(measure(case)))
        return
    seed, repeats = arguments.seed, arguments.repeats
    parts = arguments.parts or PARTS
    print(heading(seed, repeats))
    if "scale" in parts:
        print(f"\n{cases_table(scale_cases(seed, repeats))}")
    if "small" in parts:
        print(f"\n{cases_table(small_cases(seed, repeats))}")
    if "scaling" in parts:
        print(f"\n{scaling_table(seed, repeats)}")
    if "peer" in parts and arguments.dynamo is not None:
        case = Case(prefill_nodes=2, decode_nodes=4, agents=arguments.peer_agents, seed=seed)
        if arguments.trace is not None:
            case = msgspec.structs.replace(case, trace=str(arguments.trace))
        with tempfile.TemporaryDirectory() as folder:
            print(f"\n{peer_table(case, arguments.dynamo, repeats, Path(folder))}")


if __name__ == "__main__":
    main()
