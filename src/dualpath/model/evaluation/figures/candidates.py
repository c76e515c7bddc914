"""What the model may lack: candidates for the online residuals, slower prefill for DS 27B."""

from dualpath.model.evaluation import small_model
from dualpath.model.evaluation.candidates import HORIZON_S, Outcome, outcomes
from dualpath.model.evaluation.report import FigureReport, quantity
from dualpath.model.evaluation.runs import Runs
from dualpath.report.model import Table, cell

TITLE = "What the model may lack"
DISCUSSION = """\
The columns are the online numbers that the model misses and the offline numbers that it was fitted
to. "3,167 ?" stands in both offline columns because Table 3 does not name the length.

**Workload.** The spread of appends, which Table 2 does not give, moves Basic's capacity more than
anything else that leaves DualPath alone. Larger first prompts do nearly as much and meet Basic's
0.20. The distribution of turns does so a little. Nothing here lowers DualPath by more than 0.05.

**Generation.** If generated tokens do not all stay in the context (157 turns of 176 tokens are 1.7
times what fits, see Fig. 11), completion times rise by 60 %; that explains most of the one at 0.45
APS and overshoots the one at 0.1. Capacity hardly changes, since prefill sets it.

**Delays.** A fetch interval or a request path of some tenths of a second is added to every TTFT
and to nothing else. 0.7 s gives 1.6 s at 0.4 APS and no loss of capacity.

**Prefill.** Without a second micro-batch, exchange and computation add up: a tenth of capacity. A
quota of 1 s costs a quarter, at a TTFT of 2.0 s, because long passes make every engine wait for
the slowest. It nearly gives the paper's online numbers of DualPath, and none of its offline ones.

**A slower machine.** Both of the paper's systems serve fewer agents than the model's. Slowing
prefill until DualPath's capacity is 0.45 takes a factor just below 1.6 and makes the offline JCT
at 64K 4,800 s. If 3,167 s is 48K, a factor of 1.5 meets it, together with 0.48 APS and a TTFT near
1.7 s. The speed-up at 64K falls to 1.5x by that, and storage NICs at 28 GB/s bring 1.87x back. So
one machine, prefill 1.5 times slower and storage at 28 of 50 GB/s, meets JCT, largest speed-up,
DualPath's capacity and its TTFT at once; only Basic's capacity is then a tenth too low. Against
it: §7.2 says that 3FS saturates the NIC of 50 GB/s. For it: if 3,167 s is 48K, Basic's 1.87 times
that is 37 GB/s read by two nodes, close to the 41 GB/s at which the paper's Basic fails online; at
64K it is 71 GB/s, and that failure is unexplained. And Fig. 15 counts prompt tokens per second in
units of 1e7, which suits 48K.

**DS 27B.** All prefill times doubled in addition to the fitted factor (0.36 of the GPU's rates).
No factor meets all numbers: those of Fig. 8 cannot all hold in one setting.
"""
#: Capacities on the paper's grid; mean completion times follow from §8.2 (Fig. 11).
_PAPER = (
    *("paper", "0.20", "0.45", "2.25x"),
    *("1.74", "616", "1,352"),
    *("3,167 ?", "3,167 ?", "1.87x"),
)


def build(runs: Runs) -> FigureReport:
    """Run every candidate, and DS 27B at every factor."""
    found, small = outcomes(runs), small_model.slower(runs)
    return FigureReport(
        name="candidates",
        title=TITLE,
        evaluation=runs.settings,
        settings=(
            "None of this enters a figure. DS 660B on 2P4D, 64K, one change at a time; online as "
            f"in Fig. 10 with a horizon of {HORIZON_S:,.0f} s, offline with "
            f"{runs.settings.offline_agents[-1]:,} agents. DS 27B as in Fig. 7 and 8.",
        ),
        tables=(_table(found), small_model.table(small)),
        discussion=DISCUSSION,
        data={"online": found, "ds_27b": small},
    )


def _table(found: list[Outcome]) -> Table:
    columns = (
        "change",
        "Basic, APS",
        "DualPath, APS",
        "ratio",
        "TTFT at 0.4, s",
        "JCT at 0.1, s",
        "JCT at 0.45, s",
        "offline 64K, s",
        "offline 48K, s",
        "speed-up 64K",
    )
    rows = tuple(
        (
            one.title,
            f"{one.basic_aps:.2f}",
            f"{one.dualpath_aps:.2f}",
            quantity(one.ratio, "x"),
            cell(one.ttft_s, "{:.2f}"),
            cell(one.low_jct_s, "{:,.0f}"),
            cell(one.high_jct_s, "{:,.0f}"),
            cell(one.offline_s, "{:,.0f}"),
            cell(one.offline_other_s, "{:,.0f}"),
            quantity(one.speedup, "x"),
        )
        for one in found
    )
    return Table("Candidates for the online residuals", columns, (_PAPER, *rows))
