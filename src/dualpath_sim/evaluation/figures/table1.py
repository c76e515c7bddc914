"""Table 1: the cache-compute ratio of five models, from their geometry (§3)."""

from dualpath.report.model import NOTHING, Table, cell
from dualpath_sim.catalog.table1 import Table1Row, paper_table1, table1_rows
from dualpath_sim.evaluation.report import FigureReport, exact
from dualpath_sim.evaluation.runs import Runs

TITLE = "Cache-compute ratio of models"
DISCUSSION = """\
Nothing is simulated or fitted: the ratio follows from the dimensions of a model. The DeepSeek
models have two sets of rows. Geometry gives 278,528 FLOP per pair of tokens and layer (absorbed
latent attention, 128 heads); the paper's figures match 245,760, which the paper does not explain.
That number is used in this table only. The paper has no figure of DS 27B.
"""


def build(runs: Runs) -> FigureReport:
    """Compute the ratios of the paper's models and of DS 27B."""
    rows = table1_rows()
    ratios = runs.computed("ratios, GB/PFLOP", lambda: _ratios(rows))
    paper = paper_table1()
    return FigureReport(
        name="table1",
        title=TITLE,
        evaluation=runs.settings,
        settings=(
            f"GB of KV to load per PFLOP to compute, {paper.append_tokens} new tokens behind a "
            "stored context.",
        ),
        tables=(_table(rows, ratios),),
        results=exact(ratios),
        discussion=DISCUSSION,
    )


def _name(row: Table1Row, context_tokens: int) -> str:
    pair = "" if row.latent_pair_flop is None else f", {row.latent_pair_flop:,} FLOP per pair"
    return f"{row.title}, {context_tokens:,} tokens{pair}"


def _ratios(rows: tuple[Table1Row, ...]) -> dict[str, float]:
    return {
        _name(row, context_tokens): ratio
        for row in rows
        for context_tokens, ratio in zip(row.contexts_tokens, row.computed, strict=True)
    }


def _table(rows: tuple[Table1Row, ...], ratios: dict[str, float]) -> Table:
    lines = []
    for row in rows:
        for index, context_tokens in enumerate(row.contexts_tokens):
            name = _name(row, context_tokens)
            theirs = row.paper[index] if row.paper else None
            error = None if theirs is None else ratios[name] / theirs - 1
            lines.append(
                (
                    name,
                    f"{ratios[name]:.4g}",
                    NOTHING if theirs is None else f"{theirs:g}",
                    cell(error, "{:+.1%}"),
                )
            )
    return Table("GB per PFLOP", ("model and context", "here", "paper", "error"), tuple(lines))
