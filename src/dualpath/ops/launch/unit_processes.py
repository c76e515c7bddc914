"""The processes of a unit on a node of a Ray cluster: what runs inside the unit's actor.

Ray calls one method at a time, in the worker's first thread: the thread that processes are started
by, and with whose end they get SIGTERM.  So nothing of a unit outlives its actor, its node's raylet
or the command that asked for it.
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

#: A look takes no more of a log with it than this; the next one takes the rest.
_LOG_BYTES = 1 << 20
_RAY = "RAY_"
#: What starts vLLM's server with its engine core forked, as on one machine.
_FORKING_MODULE = "dualpath.ops.launch.forked_engine"


class NodePlace(msgspec.Struct, frozen=True):
    """Where a unit is: its node's address, and the devices that Ray gives it."""

    host: str
    devices: tuple[str, ...]


class Seen(msgspec.Struct, frozen=True):
    """What a look at a process found: log bytes from where it was asked for, exit code or None."""

    log: bytes
    exit_code: int | None


class UnitProcesses:
    """An actor's processes, by name; ``unit`` is how Ray's own pages call the actor."""

    def __init__(self, unit: str) -> None:
        self._unit = unit
        self._logs = Path(tempfile.mkdtemp(prefix=f"dualpath-{unit}-"))
        self._processes: dict[str, SpawnedProcess] = {}

    def __repr__(self) -> str:
        return self._unit

    def place(self) -> NodePlace:
        """Return where this is."""
        import ray

        devices = ray.get_runtime_context().get_accelerator_ids().get("GPU", ())
        return NodePlace(ray.util.get_node_ip_address(), tuple(devices))

    def claim_port(self) -> int:
        """Return a free port of this node."""
        return claim_port(self.place().host)

    def start(
        self, launches: Mapping[str, Launch], folder: str, environment: Mapping[str, str]
    ) -> None:
        """Start processes by name in ``folder``, over this node's environment ``environment``.

        Called again for the same names, it does nothing.  Raises ``ConfigError`` without a folder.
        """
        if not Path(folder).is_dir():
            raise ConfigError(
                f"there is no folder {folder} on the node of {self._unit}, and paths may be "
                "relative to it; start `dualpath serve` in a folder that all nodes have, such as /"
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

    def look(self, offsets: Mapping[str, int]) -> dict[str, Seen]:
        """Return of each process its log from an offset on; its end once all of that is seen."""
        return {name: self._look(name, offset) for name, offset in offsets.items()}

    def _look(self, name: str, offset: int) -> Seen:
        process = self._processes[name]
        exit_code = process.exit_code  # asked first: what it wrote before its end is read below
        with process.log.open("rb") as file:
            file.seek(offset)
            text = file.read(_LOG_BYTES)
        return Seen(text, exit_code if len(text) < _LOG_BYTES else None)

    def send_signal(self, name: str, number: int) -> None:
        """Send a process a signal."""
        self._processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """End a process and all it has started."""
        self._processes[name].kill()

    def close(self) -> None:
        """Kill what is left of all processes, and remove their logs, which have been taken."""
        for process in self._processes.values():
            process.kill()
        shutil.rmtree(self._logs, ignore_errors=True)


def words(launch: Launch) -> list[str]:
    """Return a launch as a command line: modules that are entries run as such."""
    module = launch.entry.partition(":")[0]
    module = _FORKING_MODULE if launch.entry == ENGINE_ENTRY else module
    return [sys.executable, "-m", module, *launch.command]
