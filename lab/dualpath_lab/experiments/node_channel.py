"""A channel to a process on a node: one JSON document per line over its standard streams.

``NodeChannel`` is the controlling end; ``read_arguments`` and ``send_line`` are for the module on
the node, which ends at the end of its input.
"""

import select
import sys
from typing import TypeVar

import msgspec

from dualpath.core.errors import EngineLostError
from dualpath_lab.nodes.machine import Node
from dualpath_lab.nodes.node_processes import NodeProcesses, module_command

ANSWER_DEADLINE_S = 60.0
_END_S = 10.0
_Message = TypeVar("_Message")


class NodeChannel:
    """A module of this package, run on a node with the struct ``arguments``.

    Its process ``name`` is one of ``processes`` and must run until it is ended.
    """

    def __init__(
        self, processes: NodeProcesses, name: str, node: Node, module: str, arguments: object
    ) -> None:
        self.node = node
        self._processes = processes
        words = [msgspec.json.encode(arguments).decode()]
        path = f"dualpath_lab.experiments.{module}"
        self.process = processes.start(module_command(name, node, path, words), pipes=True)

    def send(self, line: object) -> None:
        """Send a word or a JSON document; raises ``EngineLostError`` if the process has ended."""
        assert self.process.stdin is not None
        text = line.encode() if isinstance(line, str) else msgspec.json.encode(line)
        try:
            self.process.stdin.write(text + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise self._lost() from error

    def receive(self, kind: type[_Message], within_s: float = ANSWER_DEADLINE_S) -> _Message:
        """Return the next line.

        Raises ``EngineLostError`` if any of the processes has ended, ``DeadlineError`` after
        ``within_s``.
        """
        stdout = self.process.stdout
        assert stdout is not None

        def missing() -> str:
            readable, _, _ = select.select([stdout], [], [], 0)
            return "" if readable else f"{self.process.name} has not answered"

        self._processes.wait_until_ready(missing, within_s, awaited=self.process)
        line = stdout.readline()
        if not line:
            raise self._lost()
        return msgspec.json.decode(line, type=kind)

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        self.process.end()
        self._processes.release(self.process)

    def _lost(self) -> EngineLostError:
        self.process.wait(_END_S)
        return EngineLostError(self.process.exit_report())


def read_arguments(arguments: type[_Message]) -> _Message:
    """Return the arguments of this process."""
    return msgspec.json.decode(sys.argv[1], type=arguments)


def send_line(message: object) -> None:
    """Send one line to the controlling process."""
    sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()
