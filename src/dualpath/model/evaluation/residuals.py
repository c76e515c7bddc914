"""Why numbers miss: one sentence for each number of the paper that the model does not reach."""

from collections.abc import Sequence

from dualpath.model.evaluation.report import Compared
from dualpath.report.model import Table, cell

#: By key; numbers that are missed without a reason here say so.
REASONS = {
    "fig7.27b.speedup_max": "The model's prefill is too fast for the small model: about 3x slower "
    "would bring 2.0x (see What the model may lack). At 32K Basic also loses to its barrier.",
    "fig7.27b.to_oracle_high": "Same cause: with faster GPUs Oracle, which reads nothing, gains "
    "more than DualPath; 2x slower prefill gives 1.9x.",
    "fig8.speedup_mean": "Same cause; and the paper's three equal pairs and its largest speed-up "
    "of 2.46x allow no mean below 1.87x in any one setting, so its average is over settings that "
    "the text does not name.",
    "fig8.speedup_max": "Same cause: 3x slower prefill gives 2.45x.",
    "fig8.dualpath_2p1d_1p2d": "80 GB of DE buffer per node (§A.4) bound what the one decode "
    "node of 2P1D can have on the way; with larger buffers the pair is 1.00x.",
    "fig9.append_speedup_low": "In the model longer appends cost DualPath computation and Basic "
    "hardly anything, so that the ratio falls, as the text also says; its least value of 1.82x "
    "does not follow from that, and the factors are not named.",
    "fig9.append_speedup_high": "No factor, above or below 1, gives the model more than its "
    "unscaled 1.81x at 1,024 agents; the paper's 1.99x also exceeds its own 1.87x of Fig. 7.",
    "fig13.dualpath": "The model's storage NICs read at exactly their rate and its queues are "
    "known without delay; all that remains is the choice of sides.",
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
