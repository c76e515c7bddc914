"""A lab with a real S3 server behind shaped storage NICs: blocks use them, the lab is removed."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.e2e.test_lab_network import bits, crash, list_of, refusal
from tests.guard import GUARD_S

from dualpath.core.blocks import BlockGeometry, StoreNamespace
from dualpath_lab.nodes.cluster import (
    LabState,
    enter_node,
    lab_down,
    lab_nodes,
    lab_up,
    link_reports,
    node_environment,
    storage_url,
)
from dualpath_lab.nodes.machine import find_machine, find_remains, lab_folder, prefix, state_file
from dualpath_lab.nodes.runner import enter_user_namespace
from dualpath_lab.nodes.settings import LabSettings, Shaping, StorageServer
from dualpath_lab.nodes.steps import make_steps, storage_switch_name

NAME = f"s3test{os.getpid()}"
SETTINGS = LabSettings(
    name=NAME,
    snic_bytes_per_s=50e6,
    image_bytes=32 << 20,
    storage_server=StorageServer.S3,
    shaping=Shaping.ROOT,
)
SOURCE = str(Path(__file__).parents[2] / "src")
BLOCKS, BLOCK_BYTES = 4, 1 << 20
GEOMETRY = BlockGeometry.uniform(layers=1, block_tokens=1, layer_block_bytes=BLOCK_BYTES)
NAMESPACE = StoreNamespace("m", "float32", "NHD", GEOMETRY)

#: Writes or reads blocks, each with its number as content, on a node.
MOVE = """
import sys
import msgspec
from dualpath.core.blocks import StoreNamespace, block_keys
from dualpath.storage.factory import open_storage

namespace = msgspec.json.decode(sys.argv[2], type=StoreNamespace)
storage = open_storage(sys.argv[1], namespace)
keys = block_keys(range(int(sys.argv[4])), 1)
size = namespace.geometry.full_block_bytes
data = [memoryview(bytearray([i]) * size) for i in range(len(keys))]
if sys.argv[3] == "write":
    print(storage.write(keys, data).new)
else:
    into = [memoryview(bytearray(size)) for _ in keys]
    found = sum(storage.read(key, view).is_good for key, view in zip(keys, into))
    print(found if into == data and all(map(storage.is_stored, keys)) else "wrong bytes")
storage.close()
"""
MAKE_AND_DIE = """
import os, signal, sys
import msgspec
from dualpath_lab.nodes.cluster import lab_up
from dualpath_lab.nodes.settings import LabSettings

lab_up(msgspec.json.decode(sys.argv[1], type=LabSettings))
os.kill(os.getpid(), signal.SIGKILL)
"""
needs_root = pytest.mark.skipif(bool(refusal(SETTINGS)), reason=f"lab: {refusal(SETTINGS)}")
IN_USER_NAMESPACE = msgspec.structs.replace(
    SETTINGS, name=NAME + "u", shaping=Shaping.USER_NAMESPACES
)
needs_user_namespaces = pytest.mark.skipif(
    bool(refusal(IN_USER_NAMESPACE)), reason=f"lab: {refusal(IN_USER_NAMESPACE)}"
)


def remains(name: str) -> list[str]:
    """Return everything with a lab's prefix, found without the code under test."""
    start = prefix(name)
    named = [*list_of("/run/netns"), *list_of("/dev/shm"), *list_of(str(lab_folder()))]
    named += Path("/proc/mounts").read_text().split()
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            named += process.read_text().split("\0")
    return [one for one in named if Path(one).name.startswith(start)]


def move(state: LabState, node: int, what: str) -> str:
    """Write or read the blocks on a node; return its output."""
    namespace = msgspec.json.encode(NAMESPACE).decode()
    command = (sys.executable, "-c", MOVE, storage_url(state), namespace, what, str(BLOCKS))
    done = subprocess.run(
        enter_node(state, lab_nodes(state)[node], command),
        env={**os.environ, **node_environment(state), "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    return done.stdout.strip() or done.stderr


def snic(state: LabState, port: str) -> tuple[int, int]:
    """Rate in bits per second and bytes sent of the link from the server to a node."""
    switch = storage_switch_name(state.settings.name)
    argv = ("tc", "-s", "-n", switch, "class", "show", "dev", port)
    shown = subprocess.run(
        (*enter_user_namespace(state.anchor), *argv), check=True, capture_output=True, text=True
    ).stdout
    words = shown.split()
    return bits(words[words.index("rate") + 1]), int(words[words.index("Sent") + 1])


@pytest.fixture(scope="module")
def lab() -> Iterator[LabState]:
    state = lab_up(SETTINGS)
    try:
        yield state
    finally:
        lab_down(NAME)
    assert not remains(NAME)
    assert find_remains(NAME).is_empty


@needs_root
def test_blocks_that_one_node_writes_another_reads_over_its_own_storage_nic(lab: LabState) -> None:
    assert move(lab, 0, "write") == str(BLOCKS)
    assert snic(lab, "pe0")[1] < BLOCK_BYTES
    assert move(lab, 1, "read") == str(BLOCKS)
    assert snic(lab, "pe0")[1] < BLOCK_BYTES
    rate, sent = snic(lab, "de0")
    assert rate == 400_000_000
    assert sent >= BLOCKS * BLOCK_BYTES


@needs_root
def test_a_client_without_keys_is_refused(lab: LabState) -> None:
    keyless = {name: "wrong" for name in node_environment(lab) if name.startswith("AWS_")}
    done = subprocess.run(
        enter_node(
            lab,
            lab_nodes(lab)[0],
            (
                *(sys.executable, "-c", MOVE, storage_url(lab)),
                *(msgspec.json.encode(NAMESPACE).decode(), "read", "1"),
            ),
        ),
        env={**os.environ, **keyless, "PYTHONPATH": SOURCE},
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert "InvalidAccessKeyId" in done.stderr


@needs_root
def test_nodes_do_not_reach_each_other_over_storage_nics(lab: LabState) -> None:
    connect = "import socket; socket.create_connection(('10.78.0.11', 9), 0.3)"
    done = subprocess.run(
        enter_node(lab, lab_nodes(lab)[0], (sys.executable, "-c", connect)),
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    # Refused would mean that the other node has answered.
    assert "TimeoutError" in done.stderr or "No route" in done.stderr


@needs_root
def test_the_report_and_the_record_have_the_server(lab: LabState) -> None:
    report = {report.link: report for report in link_reports(lab)}["SNIC"]
    assert report.shaped
    assert "S3 over TCP" in report.how
    record = state_file(NAME, lab_folder())
    assert record.stat().st_mode & 0o077 == 0
    plain = msgspec.structs.replace(lab.machine, s3_server=None)
    assert not node_environment(msgspec.structs.replace(lab, machine=plain))


@needs_root
def test_after_a_crash_before_the_server_started_down_removes_all_parts() -> None:
    settings = msgspec.structs.replace(SETTINGS, name=NAME + "c")
    crash(settings, len(make_steps(settings, find_machine(settings))) - 1)
    assert not find_remains(settings.name).process_ids
    lab_down(settings.name)
    assert not remains(settings.name)
    assert find_remains(settings.name).is_empty


@needs_root
def test_the_server_of_a_killed_process_is_found_without_a_record() -> None:
    settings = msgspec.structs.replace(SETTINGS, name=NAME + "k")
    argv = (sys.executable, "-c", MAKE_AND_DIE, msgspec.json.encode(settings).decode())
    died = subprocess.run(argv, env={**os.environ, "PYTHONPATH": SOURCE}, timeout=GUARD_S)
    assert died.returncode == -signal.SIGKILL
    state_file(settings.name, lab_folder()).unlink()
    assert len(find_remains(settings.name).process_ids) == 1
    lab_down(settings.name)
    assert not remains(settings.name)
    assert find_remains(settings.name).is_empty


@needs_user_namespaces
def test_user_namespaces_shape_storage_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    state = lab_up(IN_USER_NAMESPACE)
    try:
        assert move(state, 0, "write") == str(BLOCKS)
        assert move(state, 1, "read") == str(BLOCKS)
        assert snic(state, "de0")[1] >= BLOCKS * BLOCK_BYTES
    finally:
        lab_down(IN_USER_NAMESPACE.name)
    assert not remains(IN_USER_NAMESPACE.name)
    assert find_remains(IN_USER_NAMESPACE.name).is_empty
