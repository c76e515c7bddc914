"""The actor of a unit: its processes on a node of a Ray cluster.

Ray calls one method at a time, in the worker's main thread, which also starts the processes; they
get SIGTERM when it ends.  So the processes do not outlive their actor, their node's raylet, or the
command that started the cluster.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dualpath.core.errors import ConfigError
from dualpath.ops.launch.commands import ENGINE_ENTRY, ENGINE_ENVIRONMENT
from dualpath.ops.launch.executor import Launch
from dualpath.ops.launch.ports import claim_port
from dualpath.ops.launch.process import SpawnedProcess

#: Most bytes of a log per poll; the next poll returns the rest.
_LOG_BYTES = 1 << 20
_RAY = "RAY_"
#: The module that starts vLLM's server with a forked engine core, as on one machine.
_FORKING_MODULE = "dualpath.ops.launch.forked_engine"


class NodePlace(msgspec.Struct, frozen=True):
    """The address of a unit's node, and the devices that Ray assigned to it."""

    host: str
    devices: tuple[str, ...]


class ProcessUpdate(msgspec.Struct, frozen=True):
    """Result of a poll: log bytes from the requested offset on, and the exit code or None."""

    log: bytes
    exit_code: int | None


class UnitProcesses:
    """An actor's processes, by name; ``unit`` is the actor's name in Ray's dashboard."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._logs = Path(tempfile.mkdtemp(prefix=f"dualpath-{unit}-"))
        self._processes: dict[str, SpawnedProcess] = {}

    def __repr__(self) -> str:
        return self._unit

    def place(self) -> NodePlace:
        """Return the node and devices of this actor."""
        import ray

        devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
        return NodePlace(ray.util.get_node_ip_address(), tuple(devices))

    def claim_port(self) -> int:
        """Return a free port of this node."""
        return claim_port(self.place().host)

    def start(
        self, launches: Mapping[str, Launch], folder: str, environment: Mapping[str, str]
    ) -> None:
        """Start processes in ``folder``, with ``environment`` over this node's environment.

        Idempotent.  Raises ``ConfigError`` if the folder does not exist.
        """
        if not Path(folder).is_dir():
            raise ConfigError(
                f"there is no folder {folder} on the node of {self._unit}, and paths may be "
                "relative to it; run `dualpath serve` in a folder that all nodes have, such as /"
            )
        own = {name: value for name, value in os.environ.items() if not name.startswith(_RAY)}
        for name, launch in launches.items():
            if name not in self._processes:
                self._processes[name] = SpawnedProcess(
                    name,
                    words(launch),
                    self._logs / f"{name}.log",
                    {**ENGINE_ENVIRONMENT, **own, **environment, **launch.environment},
                    folder=Path(folder),
                    ends_with_parent=signal.SIGTERM,
                )

    def poll(self, offsets: Mapping[str, int]) -> dict[str, ProcessUpdate]:
        """Return each process's log from an offset on; its exit code with the last part."""
        return {name: self._poll(name, offset) for name, offset in offsets.items()}

    def _poll(self, name: str, offset: int) -> ProcessUpdate:
        process = self._processes[name]
        exit_code = process.exit_code  # read first, so that the last output is read below
        with process.log.open("rb") as file:
            file.seek(offset)
            text = file.read(_LOG_BYTES)
        return ProcessUpdate(text, exit_code if len(text) < _LOG_BYTES else None)

    def send_signal(self, name: str, number: int) -> None:
        """Send a signal to a process."""
        self._processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """Kill a process and its children."""
        self._processes[name].kill()

    def close(self) -> None:
        """Kill all remaining processes and remove their logs, which have been copied."""
        for process in self._processes.values():
            process.kill()
        shutil.rmtree(self._logs, ignore_errors=True)


def words(launch: Launch) -> list[str]:
    """Return the command line of a launch; its module is run with ``-m``."""
    module = launch.entry.partition(":")[0]
    module = _FORKING_MODULE if launch.entry == ENGINE_ENTRY else module
    return [sys.executable, "-m", module, *launch.command]
