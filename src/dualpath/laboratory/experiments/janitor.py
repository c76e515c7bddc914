"""Removes a lab whose maker was killed: a process that only waits for that.

    python -m dualpath.laboratory.experiments.janitor LAB PROCESS-ID

Whatever ends the maker, ``kill -9`` included, the lab goes.
"""

import os
import select
import subprocess
import sys

from dualpath.laboratory.lab.cluster import lab_down


def start_janitor(lab: str) -> subprocess.Popen[bytes]:
    """Start one for a lab of this process, which kills it once the lab is removed.

    A janitor that outlived the removal could take a later lab of the same name for its own.
    """
    return subprocess.Popen(
        (sys.executable, "-m", "dualpath.laboratory.experiments.janitor", lab, str(os.getpid())),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A Ctrl-C at the terminal is for the maker.
        start_new_session=True,
    )


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
