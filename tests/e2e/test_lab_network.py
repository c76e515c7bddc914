"""A lab on this machine: rates of links, lanes of bytes, complete removal."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.guard import GUARD_S

from dualpath.core.errors import ConfigError
from dualpath.plan.traffic_class import INFERENCE_CLASS, KV_CLASS, LINK_CLASS
from dualpath_lab.nodes.cluster import (
    LabState,
    enter_node,
    lab_down,
    lab_nodes,
    lab_status,
    lab_up,
    link_reports,
)
from dualpath_lab.nodes.machine import (
    find_machine,
    find_remains,
    head_node,
    lab_folder,
    nodes,
    prefix,
    state_file,
)
from dualpath_lab.nodes.runner import enter_user_namespace
from dualpath_lab.nodes.settings import LabSettings, Shaping
from dualpath_lab.nodes.steps import CNIC, make_steps

NAME = f"test{os.getpid()}"
SETTINGS = LabSettings(
    name=NAME,
    nodes="1P2D",
    cnic_bytes_per_s=125e6,
    loopback_bytes_per_s=250e6,
    snic_bytes_per_s=50e6,
    image_bytes=32 << 20,
    shaping=Shaping.ROOT,
)
KV_PORT, OTHER_PORT = 20480, 15000
STREAM_BYTES = 2 << 20

RECEIVE = """
import hashlib, socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("listening", flush=True)
    connection, _ = server.accept()
    found = hashlib.sha256()
    while part := connection.recv(1 << 20):
        found.update(part)
print(found.hexdigest())
"""
SEND = """
import random, socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    connection.sendall(random.Random(1).randbytes(int(sys.argv[3])))
"""
READ = """
import mmap, os, sys
part = mmap.mmap(-1, 1 << 20)
file = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECT)
while os.readv(file, [part]):
    pass
"""
DIE_BEFORE = """
import os, signal, sys
import msgspec
from dualpath_lab.nodes.cluster import lab_up
from dualpath_lab.nodes.settings import LabSettings

left = int(sys.argv[2])

def count(step):
    global left
    left -= 1
    if left < 0:
        os.kill(os.getpid(), signal.SIGKILL)

lab_up(msgspec.json.decode(sys.argv[1], type=LabSettings), count)
"""


def refusal(settings: LabSettings) -> str:
    """Return why this machine and user cannot have the lab, empty if they can."""
    if settings.shaping is Shaping.ROOT and os.geteuid() != 0:
        return "needs root"
    try:
        find_machine(settings)
    except ConfigError as error:
        return str(error)
    return ""


needs_root = pytest.mark.skipif(bool(refusal(SETTINGS)), reason=f"lab: {refusal(SETTINGS)}")


def surroundings() -> dict[str, list[str]]:
    """Everything that a lab could leave on the machine, without the parts of other labs."""
    loops = [
        f"{entry.name} {(entry / 'loop' / 'backing_file').read_text()}"
        for entry in Path("/sys/block").glob("loop*")
        if (entry / "loop" / "backing_file").exists()
    ]
    mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob("*/*") if path.is_dir()]
    groups += [str(path) for path in Path("/sys/fs/cgroup").glob("*") if path.is_dir()]
    found = {
        "namespaces": list_of("/run/netns"),
        "links": list_of("/sys/class/net"),
        "loops": loops,
        # The first `ip netns` of a machine mounts this folder for good.
        "mounts": [mount for mount in mounts if mount != "/run/netns"],
        "cgroups": groups,
        "memory": list_of("/dev/shm"),
        "records": list_of(str(lab_folder())),
    }
    return {
        what: sorted(n for n in names if "dualpath-" not in n or prefix(NAME) in n)
        for what, names in found.items()
    }


def list_of(folder: str) -> list[str]:
    return os.listdir(folder) if Path(folder).is_dir() else []


def pass_stream(state: LabState, source: str, target: str, port: int) -> None:
    """Send bytes from node to node and compare them on arrival."""
    by_name = {node.name: node for node in lab_nodes(state)}
    address = by_name[target].address
    receive = (sys.executable, "-c", RECEIVE, address, str(port))
    send = (sys.executable, "-c", SEND, address, str(port), str(STREAM_BYTES))
    with subprocess.Popen(
        enter_node(state, by_name[target], receive), stdout=subprocess.PIPE, text=True
    ) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n"
        subprocess.run(enter_node(state, by_name[source], send), check=True, timeout=GUARD_S)
        received, _ = receiver.communicate(timeout=GUARD_S)
    sent = random.Random(1).randbytes(STREAM_BYTES)
    assert received.strip() == hashlib.sha256(sent).hexdigest()


def classes(state: LabState, namespace: str, device: str) -> dict[str, dict[str, int]]:
    """Rates in bytes per second and bytes sent, by class."""
    argv = ("tc", "-s", "-n", namespace, "class", "show", "dev", device)
    shown = subprocess.run(
        (*enter_user_namespace(state.anchor), *argv), check=True, capture_output=True, text=True
    ).stdout
    found = {}
    for text in shown.split("class htb ")[1:]:
        words = text.split()
        found[words[0]] = {
            "rate": bits(words[words.index("rate") + 1]),
            "ceil": bits(words[words.index("ceil") + 1]),
            "sent": int(words[words.index("Sent") + 1]),
        }
    return found


def bits(text: str) -> int:
    for unit, factor in (("Gbit", 10**9), ("Mbit", 10**6), ("Kbit", 10**3), ("bit", 1)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * factor)
    raise AssertionError(text)


@pytest.fixture(scope="module")
def lab() -> Iterator[LabState]:
    before = surroundings()
    state = lab_up(SETTINGS)
    try:
        yield state
    finally:
        lab_down(NAME)
    assert surroundings() == before


@needs_root
def test_every_link_has_its_rate_and_two_lanes_that_borrow(lab: LabState) -> None:
    for node in nodes(SETTINGS):
        for namespace, device, rate in (
            (node.full_name, CNIC, 10**9),
            (head_node(SETTINGS).full_name, node.name, 10**9),
            (node.full_name, "lo", 2 * 10**9),
        ):
            found = classes(lab, namespace, device)
            assert found[LINK_CLASS]["rate"] == rate
            assert found[INFERENCE_CLASS]["rate"] == rate * 99 // 100
            assert found[KV_CLASS]["rate"] == rate // 100
            assert {lane["ceil"] for lane in found.values()} == {rate}


@needs_root
def test_kv_ports_go_to_the_kv_lane_in_both_directions_of_a_link(lab: LabState) -> None:
    pass_stream(lab, "pe0", "de0", KV_PORT)
    pass_stream(lab, "de1", "pe0", KV_PORT + 4095)
    for name, where in (("pe0", CNIC), ("de1", CNIC)):
        sent = classes(lab, prefix(NAME) + name, where)
        assert sent[KV_CLASS]["sent"] >= STREAM_BYTES
        assert sent[INFERENCE_CLASS]["sent"] < STREAM_BYTES
    for port in ("de0", "pe0"):
        assert classes(lab, head_node(SETTINGS).full_name, port)[KV_CLASS]["sent"] >= STREAM_BYTES


@needs_root
def test_all_else_is_inference(lab: LabState) -> None:
    pass_stream(lab, "de0", "de1", OTHER_PORT)
    sent = classes(lab, prefix(NAME) + "de0", CNIC)
    assert sent[INFERENCE_CLASS]["sent"] >= STREAM_BYTES
    assert sent[KV_CLASS]["sent"] < STREAM_BYTES


@needs_root
def test_a_node_to_itself_passes_the_loopback_leg(lab: LabState) -> None:
    pass_stream(lab, "de1", "de1", KV_PORT)
    assert classes(lab, prefix(NAME) + "de1", "lo")[KV_CLASS]["sent"] >= STREAM_BYTES


@needs_root
def test_reads_of_a_node_count_against_its_own_throttle(lab: LabState) -> None:
    machine = lab.machine
    if machine.cgroups is None or machine.cgroups.version != 1:
        pytest.skip("the counters of cgroup v1 are not here")
    file = Path(machine.storage) / "blocks"
    file.write_bytes(os.urandom(4 << 20))
    os.sync()
    reader, idle = lab_nodes(lab)[:2]
    subprocess.run(
        enter_node(lab, reader, (sys.executable, "-c", READ, str(file))),
        check=True,
        timeout=GUARD_S,
    )
    read = {}
    for node in (reader, idle):
        group = Path(machine.cgroups.root) / node.full_name
        limit = (group / "blkio.throttle.read_bps_device").read_text()
        assert limit.split() == [machine.device_number, "50000000"]
        counted = (group / "blkio.throttle.io_service_bytes").read_text().splitlines()
        rows = [line.split() for line in counted if line.startswith(machine.device_number)]
        read[node.name] = sum(int(row[2]) for row in rows if row[1] == "Read")
    assert read[reader.name] >= 4 << 20
    assert read[idle.name] == 0


@needs_root
def test_one_lab_of_a_name_at_a_time(lab: LabState) -> None:
    with pytest.raises(ConfigError, match="is up"):
        lab_up(SETTINGS)
    assert lab_status(NAME) == lab
    throttled = lab.machine.cgroups is not None
    assert [report.shaped for report in link_reports(lab)] == [True, True, throttled]


@needs_root
def test_down_ends_processes_on_nodes() -> None:
    settings = msgspec.structs.replace(SETTINGS, name=NAME + "b")
    state = lab_up(settings)
    command = (sys.executable, "-c", "import signal; print(1, flush=True); signal.pause()")
    with subprocess.Popen(
        enter_node(state, lab_nodes(state)[0], command), stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline()
        lab_down(settings.name)
        assert process.wait(timeout=GUARD_S) == -signal.SIGKILL
    assert find_remains(settings.name).is_empty


def crash(settings: LabSettings, steps: int) -> None:
    """Make a lab in a process that kills itself after so many steps."""
    argv = (sys.executable, "-c", DIE_BEFORE, msgspec.json.encode(settings).decode(), str(steps))
    source = str(Path(__file__).parents[2] / "src")
    died = subprocess.run(argv, env={**os.environ, "PYTHONPATH": source}, timeout=GUARD_S)
    assert died.returncode == -signal.SIGKILL


@needs_root
@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.94, 0.98])
@pytest.mark.parametrize("record_lost", [False, True])
def test_down_removes_all_parts_that_a_crash_has_left(part: float, record_lost: bool) -> None:
    settings = msgspec.structs.replace(SETTINGS, name=NAME + "c")
    before = surroundings()
    total = len(make_steps(settings, find_machine(settings)))
    crash(settings, int(part * total))
    if record_lost:
        state_file(settings.name, lab_folder()).unlink()
    if part:
        with pytest.raises(ConfigError, match="parts of lab"):
            lab_up(settings)
    lab_down(settings.name)
    assert surroundings() == before
    assert find_remains(settings.name).is_empty


IN_USER_NAMESPACE = msgspec.structs.replace(
    SETTINGS, name=NAME + "u", nodes="1P1D", shaping=Shaping.USER_NAMESPACES
)
needs_user_namespaces = pytest.mark.skipif(
    bool(refusal(IN_USER_NAMESPACE)), reason=f"lab: {refusal(IN_USER_NAMESPACE)}"
)


@needs_user_namespaces
def test_user_namespaces_shape_the_network_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    before = surroundings()
    state = lab_up(IN_USER_NAMESPACE)
    try:
        pass_stream(state, "pe0", "de0", KV_PORT)
        lanes = classes(state, prefix(IN_USER_NAMESPACE.name) + "pe0", CNIC)
        assert lanes[KV_CLASS]["sent"] >= STREAM_BYTES
        assert [report.shaped for report in link_reports(state)] == [True, True, False]
    finally:
        lab_down(IN_USER_NAMESPACE.name)
    assert surroundings() == before
    assert find_remains(IN_USER_NAMESPACE.name).is_empty


@needs_user_namespaces
@pytest.mark.parametrize("steps", [0, 1, 20])
def test_a_crash_in_a_user_namespace_is_found_too(
    steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    crash(IN_USER_NAMESPACE, steps)
    state_file(IN_USER_NAMESPACE.name, lab_folder()).unlink()
    found = find_remains(IN_USER_NAMESPACE.name)
    assert len(found.process_ids) == (0 if steps == 0 else 1)
    lab_down(IN_USER_NAMESPACE.name)
    assert find_remains(IN_USER_NAMESPACE.name).is_empty


def test_token_buckets_report_that_links_are_not_shaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    settings = msgspec.structs.replace(SETTINGS, name=NAME + "t", shaping=Shaping.TOKEN_BUCKETS)
    state = lab_up(settings)
    assert not any(report.shaped for report in link_reports(state))
    assert {node.address for node in lab_nodes(state)} == {"127.0.0.1"}
    assert Path(state.machine.storage).is_dir()
    lab_down(settings.name)
    assert find_remains(settings.name).is_empty


@needs_root
def test_the_command_makes_shows_and_removes(tmp_path: Path) -> None:
    name, source = NAME + "d", str(Path(__file__).parents[2] / "src")
    file = tmp_path / "lab.toml"
    file.write_text(
        f'[lab]\nname = "{name}"\nnodes = "1P2D"\nshaping = "root"\nimage_bytes = 33554432\n'
    )

    def dualpath(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            (sys.executable, "-m", "dualpath.cli.main", "lab", *words),
            env={**os.environ, "PYTHONPATH": source},
            capture_output=True,
            text=True,
            timeout=GUARD_S,
        )

    try:
        assert dualpath("up", "--config", str(file)).returncode == 0
        status = json.loads(dualpath("status", "--name", name, "--json", "-").stdout)
        assert [node["name"] for node in status["nodes"]] == ["pe0", "de0", "de1"]
        assert status["shaping"] == "root"
    finally:
        removed = dualpath("down", "--name", name)
    assert removed.returncode == 0
    assert "namespaces 4" in removed.stderr
    assert "nothing to remove" in dualpath("down", "--name", name).stderr
