"""The simulator compared with the lab: predicted and measured JCT of the same agents."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np

from dualpath.core.modes import Mode
from dualpath.report.model import Panel, Series, Table
from dualpath.workload.columns.agent_table import AgentTable
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_sessions
from dualpath.workload.conversation.token_session import TokenSession
from dualpath_lab.experiments.engine_nodes import simulated_setup
from dualpath_lab.experiments.jct import (
    RATIO_TOLERANCE,
    TIME_TOLERANCE,
    Variant,
    agents_of,
    cell_of,
    engines_of,
    lab_stage,
    setting_lines,
    spoilt,
    summary_of,
)
from dualpath_lab.experiments.runs import (
    LabResult,
    Measured,
    lab_result,
    link_lines,
    load_lines,
    too_busy,
)
from dualpath_lab.experiments.settings import EmulatedNodes, JctSettings
from dualpath_lab.experiments.workload import Window, windows
from dualpath_lab.nodes.cluster import LinkReport
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    Progress,
    RawData,
    Run,
    Stage,
)
from dualpath_sim.simulator.result import NS_PER_S
from dualpath_sim.simulator.run import simulate

_DISCUSSION = """\
No parameter was fitted. The inputs of the simulator are the rates of the links, the emulated
engines' times, block sizes and buffers, and the same trajectories. It does not include HTTP, the
CPU time of router and engines, the poll interval of the transfer thread, and late wake-ups on a
shared machine."""


def predicted_jct_s(
    nodes: EmulatedNodes, lab: LabSettings, mode: Mode, agents: Sequence[Window]
) -> float:
    """Return the simulator's JCT of agents on a lab in a mode."""
    setup = simulated_setup(nodes, lab, mode)
    result = simulate(setup, agent_table(agents, nodes.block_tokens))
    return float(result.turns.finished_ns.max()) / NS_PER_S


def agent_table(agents: Sequence[Window], block_tokens: int) -> AgentTable:
    """Return the agents of a lab for the simulator, with stored histories."""
    sessions = [TokenSession(window.trajectory) for window in agents]
    table = agents_from_sessions(sessions, WorkloadSettings(block_tokens=block_tokens))
    hits = table.hit_tokens.copy()
    histories = np.asarray([window.history_tokens for window in agents])
    hits[table.first_round[:-1]] = histories // block_tokens * block_tokens
    return table._replace(hit_tokens=hits)


class Compared(LabResult, frozen=True, kw_only=True, omit_defaults=True):
    """A measured run with the simulator's JCT of the same agents."""

    predicted_s: float


def _stages(settings: JctSettings, progress: Progress) -> Iterator[Stage[Variant, Compared]]:
    def compare(run: Measured, lab: LabSettings, links: tuple[LinkReport, ...]) -> Compared:
        found = lab_result(run, lab, links)
        agents = windows(agents_of(settings, lab))
        predicted_s = predicted_jct_s(settings.emulated, lab, run.mode, agents)
        return Compared(predicted_s=predicted_s, **msgspec.structs.asdict(found))

    engines = engines_of(settings)
    for nodes in settings.nodes:
        cells = {cell_of(nodes, mode): Variant(mode, engines) for mode in settings.mode}
        yield lab_stage(settings, settings.lab_of(nodes), cells, progress, compare)


def draw(raw: RawData[JctSettings, Compared]) -> Page:
    """Draw measured times beside simulated ones."""
    rows, results, panels = [], [], []
    for nodes in raw.settings.nodes:
        series: dict[str, list[float]] = {"measured": [], "simulated": []}
        modes = [mode for mode in raw.settings.mode if raw.of(cell_of(nodes, mode))]
        for mode in modes:
            name = cell_of(nodes, mode)
            measured_s = raw.median(name, lambda run: run.jct_s)
            assert measured_s is not None
            predicted_s = raw.of(name)[0].predicted_s
            series["measured"].append(measured_s)
            series["simulated"].append(predicted_s)
            numbers = (f"{measured_s:.2f}", f"{predicted_s:.2f}")
            error = f"{predicted_s / measured_s - 1:+.1%}"
            rows.append((nodes, mode.value, *numbers, error))
            results += [
                KeyResult(
                    f"{name}: simulated / measured",
                    predicted_s / measured_s,
                    tolerance=RATIO_TOLERANCE,
                    any_machine=True,
                ),
                KeyResult(f"{name}: measured JCT, s", measured_s, tolerance=TIME_TOLERANCE),
            ]
        panels.append(_panel(nodes, modes, series))
    columns = ("cluster", "mode", "measured s", "simulated s", "error")
    return Page(
        settings=(
            *setting_lines(raw.settings),
            *link_lines(raw.results),
            *load_lines(raw, raw.results),
        ),
        tables=(Table("Job completion time, measured and simulated", columns, tuple(rows)),),
        panels=tuple(panels),
        results=tuple(results),
        discussion=_DISCUSSION,
        too_busy=too_busy(raw.results),
    )


def _panel(nodes: str, modes: Sequence[Mode], series: Mapping[str, Sequence[float]]) -> Panel:
    names = tuple(mode.value for mode in modes)
    bars = tuple(Series(name, names, tuple(values)) for name, values in series.items())
    return Panel(nodes, "grouped", "mode", "JCT (s)", bars)


def _published(page: Page, settings: JctSettings) -> RawData[JctSettings, Compared]:
    """Convert the rows of the table: cluster, mode, measured and simulated seconds, error."""
    runs = []
    for nodes, name, measured_s, predicted_s, _ in page.data["rows"]:
        mode, jct_s = Mode(name), float(measured_s)
        result = Compared(mode=mode, jct_s=jct_s, busy=0.0, predicted_s=float(predicted_s))
        runs.append(Run(cell=cell_of(nodes, mode), round=0, result=result))
    return RawData(experiment=SIMULATOR.name, settings=settings, runs=runs)


SIMULATOR = Experiment(
    name="simulator",
    title="The simulator against the lab",
    settings=JctSettings(
        nodes=("1P1D", "1P2D"), mode=(Mode.BASIC, Mode.DUALPATH, Mode.SPLIT, Mode.ORACLE)
    ),
    result=Compared,
    stages=_stages,
    draw=draw,
    summary=summary_of,
    too_busy=spoilt,
    fixed=("vllm",),
    published=_published,
)
