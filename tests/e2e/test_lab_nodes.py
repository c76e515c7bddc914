"""Processes on the nodes of a lab: the devices they see, and removal of other labs."""

import os
import subprocess
from collections.abc import Iterator

import msgspec
import pytest

from dualpath.core.errors import ConfigError
from dualpath_lab.nodes.cluster import LabState, enter_node, lab_down, lab_nodes, lab_up
from dualpath_lab.nodes.machine import find_machine, find_remains
from dualpath_lab.nodes.settings import LabSettings, Shaping
from dualpath_lab.nodes.steps import CNIC

NAME = f"nodes{os.getpid()}"
SETTINGS = LabSettings(name=NAME, image_bytes=16 << 20, shaping=Shaping.ROOT)


def refusal() -> str:
    """Return why this machine and user cannot have the lab, empty if they can."""
    try:
        find_machine(SETTINGS)
    except ConfigError as error:
        return str(error)
    return ""


pytestmark = pytest.mark.skipif(bool(refusal()), reason=f"lab: {refusal()}")


@pytest.fixture
def lab() -> Iterator[LabState]:
    state = lab_up(SETTINGS)
    try:
        yield state
    finally:
        lab_down(NAME)


def test_a_node_shows_its_own_devices_to_ucx(lab: LabState) -> None:
    command = enter_node(lab, lab_nodes(lab)[0], ("ls", "/sys/class/net"))
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert sorted(listed.split()) == [CNIC, "lo"]


def test_a_lab_is_removed_while_processes_of_another_run(lab: LabState) -> None:
    other = msgspec.structs.replace(SETTINGS, name=NAME + "b")
    lab_up(other)
    command = enter_node(lab, lab_nodes(lab)[0], ("sh", "-c", "echo here; read end"))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"here\n"
        # Waits for the loop device, which the process must not hold.
        lab_down(other.name)
        assert find_remains(other.name).is_empty
        assert process.poll() is None
        process.communicate()
