"""Table 2: the means of the three datasets, and those of the trajectories generated for them."""

from functools import partial

import numpy as np

from dualpath.core.modes import Mode
from dualpath.report.model import Table
from dualpath.workload.columns.generator import DATASETS, Dataset
from dualpath_sim.evaluation.report import FigureReport, exact
from dualpath_sim.evaluation.runs import Runs
from dualpath_sim.evaluation.settings import DS_660B, RunSpec

TITLE = "Datasets"
#: The generator makes as many trajectories as each of the paper's datasets has.
TRAJECTORIES = 500
DISCUSSION = """\
The paper's trajectories are not public. Those of every simulation are generated to have the means
of the table, and these means are its only numbers. Read as means over all turns they contradict
each other (turns times appended and generated tokens exceed the total by 1.6 to 1.7 times), so
every column is read as a mean over trajectories.
"""


def build(runs: Runs) -> FigureReport:
    """Generate each dataset once and take its means."""
    found = {
        name: runs.computed(f"means of {name}", partial(_means, runs, name)) for name in DATASETS
    }
    return FigureReport(
        name="table2",
        title=TITLE,
        evaluation=runs.settings,
        settings=(f"{TRAJECTORIES} trajectories per dataset, none sampled twice.",),
        tables=(_table(found),),
        results=exact(
            {
                f"{name}: {what}": number
                for name, numbers in found.items()
                for what, number in numbers.items()
            }
        ),
        discussion=DISCUSSION,
    )


def _means(runs: Runs, name: str) -> dict[str, float]:
    """Return the means over trajectories, as the columns of Table 2 are read."""
    spec = RunSpec(system=DS_660B, mode=Mode.DUALPATH, workload=name, agents=TRAJECTORIES)
    agents = runs.agents(spec)
    first, turns = agents.first_round[:-1], np.diff(agents.first_round)
    last = agents.first_round[1:] - 1
    prompt, generated = agents.prompt_tokens.astype(float), agents.generated_tokens.astype(float)
    before = np.concatenate([[0.0], (prompt + generated)[:-1]])
    before[first] = 0.0
    append = prompt - before
    return {
        "turns": float(turns.mean()),
        "append": float((np.add.reduceat(append, first) / turns).mean()),
        "gen": float((np.add.reduceat(generated, first) / turns).mean()),
        "total": float((prompt + generated)[last].mean()),
        "context": float((np.add.reduceat(before, first) / turns).mean()),
    }


def _paper(dataset: Dataset) -> dict[str, float]:
    return {
        "turns": dataset.turns,
        "append": dataset.append_tokens,
        "gen": dataset.generated_tokens,
        "total": dataset.total_tokens,
        "context": dataset.context_tokens,
    }


def _table(found: dict[str, dict[str, float]]) -> Table:
    rows = tuple(
        (
            name,
            what,
            f"{number:,.0f}",
            f"{paper[what]:,.0f}",
            f"{number / paper[what] - 1:+.1%}",
        )
        for name, numbers in found.items()
        for paper in (_paper(DATASETS[name]),)
        for what, number in numbers.items()
    )
    columns = ("MaxLen", "mean of a trajectory", "here", "paper", "error")
    return Table("Means over trajectories, tokens", columns, rows)
