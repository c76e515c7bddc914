"""How long tests wait in real time for expected events, and the wait for a process's end.

It guards a run against hanging and asserts nothing: machines may be slow, and several processes
may share one core.  pytest's own limit for a test (pyproject.toml) is longer, so that what was
awaited is seen to be missing before the test is cut off.
"""

import os
import select

GUARD_S = 120.0


def ends(process_id: int) -> bool:
    """Wait for the end of a process, which may not be a child."""
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        return True
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    over = bool(poller.poll(GUARD_S * 1000))
    os.close(descriptor)
    return over
