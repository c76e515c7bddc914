"""Temporary labs: a janitor process waits for the end of the process that made one and removes it.

    python -m dualpath_lab.nodes.janitor LAB PROCESS-ID

So the lab is removed whatever ends that process, ``kill -9`` included.
"""

import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dualpath.launch.process import SpawnedProcess
from dualpath_lab.nodes.cluster import LabState, lab_down, lab_up
from dualpath_lab.nodes.settings import LabSettings

_END_S = 10.0


@contextmanager
def temporary_lab(
    settings: LabSettings, progress: Callable[[str], None] = lambda text: None
) -> Iterator[LabState]:
    """Make a lab for the ``with`` block, then remove it; a janitor does so if this is killed.

    Raises ``ConfigError`` as ``lab_up`` and ``lab_down``.
    """
    # It is in its own process group and survives this process: it waits for the end of this one.
    janitor = SpawnedProcess(
        "janitor",
        (sys.executable, "-m", "dualpath_lab.nodes.janitor", settings.name, str(os.getpid())),
        Path(os.devnull),
        ends_with_parent=None,
    )
    try:
        state = lab_up(settings)
        try:
            progress(f"lab of {settings.nodes} is up")
            yield state
        finally:
            progress(f"lab removed: {lab_down(settings.name)}")
    finally:
        # After the removal: until then it is needed in case this process is killed.  A janitor that
        # survived the removal could remove a later lab of the same name.
        janitor.kill()
        janitor.wait(_END_S)


def main() -> None:
    """Wait for the process to end, then remove the lab."""
    lab, process_id = sys.argv[1], int(sys.argv[2])
    try:
        descriptor = os.pidfd_open(process_id)
    except ProcessLookupError:
        pass
    else:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        poller.poll()
    lab_down(lab)


if __name__ == "__main__":
    main()
