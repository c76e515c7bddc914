"""Why numbers miss: one sentence for each number of the paper that the model does not reach."""

from collections.abc import Sequence

from dualpath.model.evaluation.report import Compared
from dualpath.report.model import Table, cell

#: By key; numbers that are missed without a reason here say so.
REASONS = {
    "fig8.speedup_mean": "The paper's three equal pairs and its largest speed-up of 2.46x allow no "
    "mean below 1.87x in any one setting, so its average is over settings that the text does not "
    "name.",
    "fig8.dualpath_2p1d_1p2d": "80 GB of DE buffer per node (§A.4) bound what the one decode "
    "node of 2P1D can have on the way.",
    "fig9.append_speedup_low": "In the model longer appends cost DualPath computation and Basic "
    "hardly anything, so that the ratio falls, as the text also says; its least value of 1.82x "
    "does not follow from that, and the factors are not named.",
    "fig9.append_speedup_high": "No factor, above or below 1, gives the model more than its "
    "unscaled 1.81x at 1,024 agents; the paper's 1.99x also exceeds its own 1.87x of Fig. 7.",
}


def missed(compared: Sequence[Compared]) -> Table | None:
    """Return the offline numbers beyond the target, each with its reason; None if there is none."""
    rows = tuple(
        (
            one.quoted.what,
            cell(one.relative_error, "{:+.1%}"),
            REASONS.get(one.key, "Not explained."),
        )
        for one in compared
        if one.quoted.offline and one.within_target is False
    )
    return Table("Offline numbers beyond 5 %", ("number", "error", "why"), rows) if rows else None
