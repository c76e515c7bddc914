"""Two thousand simulated clusters, each with the faults of its seed."""

import os

import pytest

from dualpath_lab.faults.simulation.run import outcomes


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("first", "seeds"),
    [
        (0, 150),
        *(pytest.param(first, 500, marks=pytest.mark.long) for first in (150, 650, 1150)),
        pytest.param(1650, 350, marks=pytest.mark.long),
    ],
)
def test_no_request_is_lost_hangs_or_gets_wrong_tokens(first: int, seeds: int) -> None:
    failing = [o for o in outcomes(first, seeds, os.cpu_count() or 1) if o.problems]
    messages = [f"seed {o.seed}: {'; '.join(o.problems[:3])}" for o in failing]
    assert not failing, "\n".join(messages)
