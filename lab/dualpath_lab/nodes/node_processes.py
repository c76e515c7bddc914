"""Processes on the nodes of a lab: behind its links, each with a log, ended with their parent."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dualpath.launch.process import SpawnedProcess, Supervisor
from dualpath.node.cluster_secret import SECRET_VARIABLE, new_secret
from dualpath_lab.nodes.cluster import LabState, enter_node, node_environment
from dualpath_lab.nodes.machine import Node


class NodeCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A process to start: its name, node, command and additional environment variables.

    ``ready_url`` answers 200 once it can be used; empty: do not wait.  ``ends_last`` as in
    ``Supervisor.add``.
    """

    name: str
    node: Node
    argv: tuple[str, ...]
    environment: Mapping[str, str] = {}
    ready_url: str = ""
    ends_last: bool = False


def module_command(
    name: str,
    node: Node,
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str] | None = None,
    *,
    ends_last: bool = False,
) -> NodeCommand:
    """Return the command that runs a module with the Python of this process."""
    return NodeCommand(
        name=name,
        node=node,
        argv=(sys.executable, "-m", module, *arguments),
        environment=environment or {},
        ends_last=ends_last,
    )


class NodeProcesses(Supervisor):
    """The processes of one run on a lab."""

    def __init__(self, state: LabState, logs: Path) -> None:
        super().__init__()
        self.logs = logs
        self._state = state
        self._on: dict[str, SpawnedProcess] = {}
        # Nodes have separate addresses, so control messages need a secret.
        self._environment = {SECRET_VARIABLE: new_secret(), **node_environment(state)}

    def start(self, command: NodeCommand, *, pipes: bool = False) -> SpawnedProcess:
        """Start a command on its node; ``pipes`` as in ``SpawnedProcess``."""
        # The commands that enter the node end in exec, so the process is the command itself.
        process = SpawnedProcess(
            command.name,
            enter_node(self._state, command.node, command.argv),
            self.logs / f"{command.name}.log",
            {**os.environ, **self._environment, **command.environment},
            pipes=pipes,
        )
        self._on.setdefault(command.node.name, process)
        return self.add(process, ends_last=command.ends_last)

    def first_on(self, node: Node) -> SpawnedProcess:
        """Return the first process that was started on a node."""
        return self._on[node.name]
