"""Make, inspect and remove a lab: up, status and down."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.node.output_files import write_whole
from dualpath_lab.nodes.machine import (
    LabMachine,
    Node,
    find_machine,
    find_remains,
    head_node,
    is_alive,
    lab_folder,
    nodes,
    start_ticks,
    state_file,
)
from dualpath_lab.nodes.runner import Runner, enter_user_namespace
from dualpath_lab.nodes.s3_server import bucket_url, client_environment
from dualpath_lab.nodes.settings import LabSettings, Shaping
from dualpath_lab.nodes.steps import (
    CNIC,
    RemoveFile,
    Step,
    cgroup_folder,
    cnics,
    make_steps,
    undo_steps,
)


class LabState(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a lab, written before anything else is made.

    ``complete`` once it can be used; ``maker`` is the process that made it, ``maker_ticks`` its
    start; ``anchor`` is the process that holds its user namespace, 0 without one.
    """

    settings: LabSettings
    machine: LabMachine
    maker: int
    maker_ticks: int
    complete: bool = False
    anchor: int = 0


class LinkReport(msgspec.Struct, frozen=True):
    """How one kind of link is shaped."""

    link: str
    bytes_per_s: float
    shaped: bool
    how: str


def lab_up(settings: LabSettings, before: Callable[[Step], None] = lambda step: None) -> LabState:
    """Make a lab and return its record; ``before`` is called with each step before its execution.

    Raises ``ConfigError`` if a lab of that name exists, or if a step fails after removing its
    parts.
    """
    machine, steps = lab_steps(settings)
    maker = os.getpid()
    state = LabState(
        settings=settings, machine=machine, maker=maker, maker_ticks=start_ticks(maker)
    )
    file = _create_record(state)
    runner = Runner()
    try:
        for step in steps:
            before(step)
            runner.do(step)
        state = msgspec.structs.replace(state, complete=True, anchor=runner.anchor)
        _replace_record(file, state)
    except BaseException:
        _remove(settings.name)
        raise
    return state


def lab_steps(settings: LabSettings) -> tuple[LabMachine, tuple[Step, ...]]:
    """Return the machine and the steps that make a lab; changes nothing.

    Raises ``ConfigError`` if a lab of that name exists, or the machine does not support it.
    """
    _refuse_second(settings.name)
    machine = find_machine(settings)
    return machine, make_steps(settings, machine)


def lab_status(name: str) -> LabState:
    """Return the record of a lab that is up.

    Raises ``ConfigError`` if there is none, or only parts of one.
    """
    state = _read_record(name)
    if state is not None and state.complete:
        if state.anchor and not start_ticks(state.anchor):
            raise ConfigError(
                f"lab {name!r} lost process {state.anchor}, which held its namespaces; "
                f"`dualpath lab down --name {name}`"
            )
        return state
    _refuse_second(name)
    raise ConfigError(f"no lab {name!r} is up; make one with `dualpath lab up --name {name}`")


def lab_down(name: str) -> str:
    """Remove a lab, or the parts that a crash has left; return a summary of what was found.

    Processes on its nodes are killed.  Raises ``ConfigError`` if a part cannot be removed, after
    removing the others.
    """
    state = _read_record(name)
    if state is not None and not state.complete and is_alive(state.maker, state.maker_ticks):
        raise ConfigError(f"process {state.maker} is making lab {name!r}; wait for it or end it")
    return _remove(name)


def enter_node(state: LabState, node: Node, argv: tuple[str, ...]) -> tuple[str, ...]:
    """Return the command that runs ``argv`` on a node, behind its links."""
    machine = state.machine
    if machine.shaping is Shaping.TOKEN_BUCKETS:
        return argv
    # Unlike `nsenter --net`, this also shows the node's devices in /sys, where UCX looks for them.
    enter_network = ("ip", "netns", "exec", node.full_name)
    command = (*enter_user_namespace(state.anchor), *enter_network, *argv)
    if machine.cgroups is None or node == head_node(state.settings):
        return command
    # The shell joins the cgroup and becomes the command, so that all of its reads count.
    join = 'echo $$ > "$0" && exec "$@"'
    return ("sh", "-c", join, f"{cgroup_folder(machine.cgroups, node)}/cgroup.procs", *command)


def link_reports(state: LabState) -> tuple[LinkReport, ...]:
    """Return how each link is shaped."""
    settings, machine = state.settings, state.machine
    network = machine.shaping is not Shaping.TOKEN_BUCKETS
    lanes = f"inference : KV = {settings.weights.text}, KV is TCP {settings.ports.text}"
    none = "not shaped: the nodes are processes in one network"
    cnic, loopback = (f"HTB both ways, {lanes}", f"HTB, {lanes}") if network else (none, none)
    shaped = machine.cgroups is not None or machine.s3_server is not None
    if machine.s3_server is not None:
        reads = "HTB from server to node, S3 over TCP; writes are not shaped"
    elif machine.cgroups is not None:
        reads = (
            f"cgroup v{machine.cgroups.version} on device {machine.device_number}, O_DIRECT reads"
        )
    else:
        reads = "not throttled by the kernel: set snic_bytes_per_s of engines, a token bucket"
    return (
        LinkReport("CNIC", settings.cnic_bytes_per_s, network, cnic),
        LinkReport("loopback", settings.loopback_rate_bytes_per_s, network, loopback),
        LinkReport("SNIC", settings.snic_bytes_per_s, shaped, reads),
    )


def lab_nodes(state: LabState) -> tuple[Node, ...]:
    """Return the nodes with the addresses by which they reach each other."""
    return tuple(_reachable(state, node) for node in nodes(state.settings))


def lab_head(state: LabState) -> Node:
    """Return the node for router and clients, which has no shaped link."""
    return _reachable(state, head_node(state.settings))


def _reachable(state: LabState, node: Node) -> Node:
    if state.machine.shaping is not Shaping.TOKEN_BUCKETS:
        return node
    return msgspec.structs.replace(node, address="127.0.0.1")


def storage_url(state: LabState, part: str = "") -> str:
    """Return the storage URL for engines on the nodes: a folder or a bucket.

    ``part`` is a separate part of it, like ``run-1``.
    """
    if state.machine.s3_server is not None:
        return bucket_url(part)
    return str(Path(state.machine.storage) / part)


def node_environment(state: LabState) -> dict[str, str]:
    """Return environment variables for commands on the nodes.

    With an S3 server these are its keys, and for UCX the NICs for KV between nodes.
    """
    server = state.machine.s3_server
    if server is None:
        return {}
    # The variable would override the device of each rank.
    devices = {} if node_cnics(state) else {"UCX_NET_DEVICES": f"{CNIC},lo"}
    return {**client_environment(server), **devices}


def node_cnics(state: LabState) -> tuple[str, ...]:
    """Return the network device of each rank of a node's engine; empty where UCX may choose."""
    several = state.settings.cnics > 1 and state.machine.shaping is not Shaping.TOKEN_BUCKETS
    return cnics(state.settings) if several else ()


def _refuse_second(name: str) -> None:
    state = _read_record(name)
    if state is not None and state.complete:
        raise ConfigError(
            f"lab {name!r} is up ({state.settings.nodes}); remove it with `dualpath lab down "
            f"--name {name}`, or choose another --name"
        )
    if state is not None and is_alive(state.maker, state.maker_ticks):
        raise ConfigError(f"process {state.maker} is making lab {name!r}; wait for it")
    found = find_remains(name)
    if not found.is_empty:
        raise ConfigError(
            f"parts of lab {name!r} exist ({found.counts()}); remove them with "
            f"`dualpath lab down --name {name}`"
        )


def _remove(name: str) -> str:
    found = find_remains(name)
    runner = Runner()
    failures: list[str] = []
    for step in undo_steps(found):
        # The record stays until all other parts are removed.
        if failures and isinstance(step, RemoveFile) and step.path.endswith(".json"):
            break
        try:
            runner.do(step)
        except ConfigError as error:
            failures.append(str(error))
    if failures:
        raise ConfigError(
            f"{'; '.join(failures)}; the other parts of lab {name!r} are removed: end the "
            "processes that use these, and repeat as the user who made the lab"
        )
    _remove_if_empty(lab_folder())
    return found.counts()


def _remove_if_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _create_record(state: LabState) -> Path:
    file = state_file(state.settings.name, Path(state.machine.folder))
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        _write_private(file, msgspec.json.encode(state))
    except FileExistsError as error:
        raise ConfigError(
            f"another process is making lab {state.settings.name!r}; wait for it"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"record {str(file)!r} cannot be written ({error}); make the folder writable"
        ) from error
    return file


def _replace_record(file: Path, state: LabState) -> None:
    write_whole(file, msgspec.json.encode(state))  # as private as the record that it replaces


def _write_private(file: Path, content: bytes) -> None:
    """Write a new file that only its owner may read, as a record may contain keys."""
    with open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as record:
        record.write(content)


def _read_record(name: str) -> LabState | None:
    """Return a lab's record; None if there is none or a crash left it unreadable."""
    file = state_file(name, lab_folder())
    try:
        return msgspec.json.decode(file.read_bytes(), type=LabState)
    except FileNotFoundError:
        return None
    except (msgspec.MsgspecError, ConfigError):
        # Written only in part: the parts of the lab are found by their names.
        return None
