"""Two thousand clusters on virtual time, each with the faults of its seed."""

import os

import pytest

from dualpath.laboratory.chaos.simulation.campaign import outcomes

SEEDS = 2000


@pytest.mark.timeout(900)
def test_nothing_is_lost_nothing_hangs_and_nothing_is_wrong() -> None:
    failing = [o for o in outcomes(0, SEEDS, os.cpu_count() or 1) if o.problems]
    told = [f"seed {o.seed}: {'; '.join(o.problems[:3])}" for o in failing]
    assert not failing, "\n".join(told)
