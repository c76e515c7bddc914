"""The simulator compared with the lab: predicted and measured JCT of the same agents."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from dualpath.core.modes import Mode
from dualpath.report.model import Panel, Series, Table
from dualpath.workload.columns.agent_table import AgentTable
from dualpath.workload.columns.sessions_to_columns import WorkloadSettings, agents_from_sessions
from dualpath.workload.conversation.token_session import TokenSession
from dualpath_lab.experiments.engine_nodes import simulated_setup
from dualpath_lab.experiments.jct import agents_of, jobs_of, setting_lines
from dualpath_lab.experiments.report import ExperimentReport
from dualpath_lab.experiments.runs import Job, link_line, machine_lines, too_busy
from dualpath_lab.experiments.settings import EmulatedNodes, JctSettings
from dualpath_lab.experiments.workload import Window
from dualpath_lab.nodes.settings import LabSettings
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


def compare_with_simulator(
    settings: JctSettings, command: str, progress: Callable[[str], None] = lambda text: None
) -> ExperimentReport:
    """Measure every mode on every cluster and simulate the same; raises as ``measure_jct``."""
    jobs = jobs_of(settings, progress)
    rows, errors, panels = [], [], []
    for job in jobs:
        series: dict[str, list[float]] = {"measured": [], "simulated": []}
        for mode in job.runs:
            measured_s = job.jct_s(mode)
            assert measured_s is not None
            predicted_s = predicted_jct_s(settings.emulated, job.lab, mode, job.agents)
            series["measured"].append(measured_s)
            series["simulated"].append(predicted_s)
            errors.append(predicted_s / measured_s - 1)
            rows.append(
                (
                    job.lab.nodes,
                    mode.value,
                    f"{measured_s:.2f}",
                    f"{predicted_s:.2f}",
                    f"{errors[-1]:+.1%}",
                )
            )
        panels.append(_panel(job, series))
    runs = [run for job in jobs for done in job.runs.values() for run in done]
    return ExperimentReport(
        name=settings.name,
        title="The simulator against the lab",
        command=command,
        settings=(
            *setting_lines(settings),
            link_line(jobs[-1].links),
            *machine_lines(runs),
        ),
        tables=(
            Table(
                "Job completion time, measured and simulated",
                ("cluster", "mode", "measured s", "simulated s", "error"),
                tuple(rows),
            ),
        ),
        panels=tuple(panels),
        discussion=_DISCUSSION,
        data={"errors": errors, "rows": rows, "agents": agents_of(settings, jobs[-1].lab)},
        too_busy=too_busy(runs),
    )


def _panel(job: Job, series: Mapping[str, Sequence[float]]) -> Panel:
    modes = tuple(mode.value for mode in job.runs)
    bars = tuple(Series(name, modes, tuple(values)) for name, values in series.items())
    return Panel(job.lab.nodes, "grouped", "mode", "JCT (s)", bars)
