"""CPU time of a process with all its descendants."""

import subprocess
import sys

from dualpath_lab.experiments.machine_load import process_cpu_s

WORK_S = 0.1
BUSY_CHILD = f"""
import sys, time
while time.process_time() < {WORK_S}:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def test_the_cpu_time_of_a_process_includes_its_children() -> None:
    # The shell itself takes hardly any time.
    command = ("sh", "-c", f"{sys.executable} -c '{BUSY_CHILD}'; true")
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"done\n"
        assert process_cpu_s(shell.pid) >= WORK_S / 2  # the kernel counts in ticks
        shell.communicate()
    assert process_cpu_s(shell.pid) == 0
