"""Processes on the nodes of a lab: behind its links, with a log each, gone with their parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType

from dualpath.core.errors import EngineLostError
from dualpath.laboratory.experiments.machine_load import process_cpu_s
from dualpath.laboratory.lab.cluster import LabState, enter_node, node_environment
from dualpath.laboratory.lab.machine import Node
from dualpath.ops.launch.process import die_with_parent
from dualpath.transport.cluster_secret import SECRET_VARIABLE, new_secret

_LOG_TAIL_LINES = 15
_END_S = 20.0
_POLL_S = 0.02


class NodeProcess:
    """One command on one node."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process

    @property
    def pid(self) -> int:
        """Process id, of the command itself: what enters the node becomes it."""
        return self._process.pid

    @property
    def cpu_s(self) -> float:
        """CPU seconds so far, 0 once it has ended."""
        return process_cpu_s(self.pid)

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative for a signal, None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int | None:
        """Wait for its end; return the exit code, None after the timeout."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        text = self.log.read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.splitlines()[-_LOG_TAIL_LINES:])

    def signal(self, number: int) -> None:
        """Send a signal to it and all it has started."""
        try:
            os.killpg(self.pid, number)
        except ProcessLookupError:
            return


class NodeProcesses:
    """The processes of one run; a context manager that ends them, first started last."""

    def __init__(self, state: LabState, logs: Path) -> None:
        self._state = state
        self._logs = logs
        # Nodes have addresses of their own, where control messages need a secret.
        self._secret = {SECRET_VARIABLE: new_secret()}
        self._processes: list[NodeProcess] = []

    def __enter__(self) -> "NodeProcesses":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(hard=error is not None)

    def start(
        self,
        name: str,
        node: Node,
        argv: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> NodeProcess:
        """Start a command on a node; its output goes to a log of its name."""
        log = self._logs / f"{name}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                enter_node(self._state, node, tuple(argv)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    **self._secret,
                    **node_environment(self._state),
                    **(environment or {}),
                },
                start_new_session=True,
                preexec_fn=partial(die_with_parent, signal.SIGKILL),
            )
        started = NodeProcess(name, process, log)
        self._processes.append(started)
        return started

    def start_module(
        self,
        name: str,
        node: Node,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str] | None = None,
    ) -> NodeProcess:
        """Start a module of this Python on a node."""
        argv = (sys.executable, "-m", module, *arguments)
        return self.start(name, node, argv, environment)

    @property
    def all(self) -> tuple[NodeProcess, ...]:
        """All started so far, in order."""
        return tuple(self._processes)

    def check_alive(self, may_end: NodeProcess | None = None) -> None:
        """Raise ``EngineLostError`` with the end of its log if a process has ended.

        ``may_end`` may have ended well.
        """
        for process in self._processes:
            fine = (None, 0) if process is may_end else (None,)
            if process.exit_code not in fine:
                raise EngineLostError(
                    f"{process.name} ended with exit code {process.exit_code}; the end of its "
                    f"log:\n{process.log_tail()}"
                )

    def wait_until(
        self,
        ready: Callable[[], bool],
        what: str,
        deadline_s: float,
        may_end: NodeProcess | None = None,
    ) -> None:
        """Poll until ``ready``; raises ``EngineLostError`` if a process ends or time is over."""
        end_s = time.monotonic() + deadline_s
        while not ready():
            self.check_alive(may_end)
            if time.monotonic() > end_s:
                raise EngineLostError(f"{what} took more than {deadline_s:g} s; see {self._logs}")
            time.sleep(_POLL_S)

    def end(self, *, hard: bool = False) -> None:
        """End all, those started last first; ``hard`` kills at once.  Idempotent."""
        for process in reversed(self._processes):
            process.signal(signal.SIGKILL if hard else signal.SIGTERM)
            if process.wait(_END_S) is None:
                process.signal(signal.SIGKILL)
                process.wait(_END_S)
        self._processes = []
