"""Two thousand simulated clusters, each with the faults of its seed."""

import os

import pytest

from dualpath_lab.faults.simulation.run import outcomes

SEEDS = 2000
#: Seeds per test: a minute or two on two slow cores.
AT_ONCE = 500


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "first",
    [0, *(pytest.param(first, marks=pytest.mark.long) for first in range(AT_ONCE, SEEDS, AT_ONCE))],
)
def test_no_request_is_lost_hangs_or_gets_wrong_tokens(first: int) -> None:
    failing = [o for o in outcomes(first, AT_ONCE, os.cpu_count() or 1) if o.problems]
    messages = [f"seed {o.seed}: {'; '.join(o.problems[:3])}" for o in failing]
    assert not failing, "\n".join(messages)
