"""One router as several processes of this machine: a scheduler, and front ends at one port.

The kernel divides connections among the front ends (SO_REUSEPORT), so that each has its own queue
and none takes the connections of all.  This process only watches: a front end that ends takes its
own streams with it and is started again while the others serve; so is the scheduler, to which front
ends and engines then come back.
"""

import os
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType, TracebackType
from typing import Self

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from dualpath.core.configuration import OTHER_VARIABLES, PREFIX, variable
from dualpath.core.errors import ConfigError
from dualpath.core.settings import arguments, declared
from dualpath.ops.launch.ports import claim_port, family_of, free_port
from dualpath.ops.launch.process import SpawnedProcess, Supervisor, local
from dualpath.ops.launch.restarts import DRAIN_GUARD_S, Restarts
from dualpath.router.http.settings import SchedulerAddress
from dualpath.router.links.settings import LinkSettings
from dualpath.router.observe.metrics import SHARED_METRICS
from dualpath.router.setting_owners import FRONT_ENDS_OWN, SCHEDULERS_OWN
from dualpath.router.settings import RouterSettings

SCHEDULER = "scheduler"
#: Of a command that was given what cannot be.
EXIT_REFUSED = 2
_POLL_S = 0.05
#: Every address of the machine, and where this machine itself finds what listens there.
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}


@contextmanager
def client_port(host: str, port: int) -> Iterator[int]:
    """Reserve the port that front ends share, in the block; yields its number.

    It is bound and does not listen, so that the kernel gives it no connection.  Raises
    ``ConfigError`` if somebody else has it.
    """
    with socket.socket(family_of(host)) as reserved:
        try:
            # Without SO_REUSEPORT first: it would share with any other server of this user.
            number = free_port(host, port)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind((host, number))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error.strerror}; free it or choose another "
                "with --host and --port"
            ) from error
        yield number


class ScaledRouter:
    """The processes of ``settings.front_ends`` > 0; a context manager that ends them.

    ``front_end`` returns the words after ``dualpath`` that start a front end of these settings and
    this link.  ``adapters`` are those that clients may name, with their paths.  Addresses of port 0
    are chosen once.  Ends and restarts are logged.
    """

    def __init__(
        self,
        settings: RouterSettings,
        host: str,
        front_end: Callable[[RouterSettings, LinkSettings], Sequence[str]],
        adapters: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        settings = _with_ports(settings, host)
        self.control_address = f"tcp://{settings.control_host}:{settings.control_port}"
        self.cluster_url = f"http://{host}:{settings.cluster_port}"
        #: Whichever front end a scrape reaches answers for all, those before it included.
        self._metrics = tempfile.TemporaryDirectory(prefix="dualpath-metrics-")
        self._environment = _environment(settings, os.environ)
        self._commands: dict[str, Sequence[str]] = {}
        self._commands[SCHEDULER] = scheduler_command(settings, host, adapters)
        for index in range(settings.front_ends):
            link = _link(settings, index)
            own = _without(settings, (*SCHEDULERS_OWN, "api_keys"))
            self._commands[f"front-end-{index}"] = front_end(own, link)
        self._supervisor = Supervisor()
        self._restarts = Restarts(self._start)
        self._starts: Counter[str] = Counter()

    def __enter__(self) -> Self:
        for name in self._commands:
            self._start(name)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all; after an error or Ctrl-C requests under way end with an error."""
        self._supervisor.end(interrupt=error is not None)
        self._metrics.cleanup()

    def watch(self) -> None:
        """Start again whatever ends; never returns.

        Raises ``ConfigError`` for a process whose first start is refused: so will the next be.
        """
        while True:
            for process in self._supervisor.processes:
                if process.exit_code == EXIT_REFUSED and self._starts[process.name] == 1:
                    raise ConfigError(
                        f"{process.name} cannot be started; its own words stand above"
                    )
            self._restarts.turn(self._supervisor.processes, time.monotonic())
            time.sleep(_POLL_S)

    def drain(self) -> None:
        """Take no new requests; return when those under way have ended, with their front ends."""
        fronts = [p for p in self._supervisor.processes if p.name != SCHEDULER]
        for process in fronts:
            process.terminate()
        until_s = time.monotonic() + DRAIN_GUARD_S
        # A scheduler that is lost meanwhile is still needed, a front end is not.
        while any(p.alive for p in fronts) and time.monotonic() < until_s:
            scheduler = self._supervisor.process(SCHEDULER)
            self._restarts.turn([scheduler], time.monotonic())
            time.sleep(_POLL_S)

    def _start(self, name: str) -> None:
        is_front_end = name != SCHEDULER
        if is_front_end and self._starts[name]:
            # What it counted stays; what it had under way ended with it.
            old = local(self._supervisor.process(name))
            mark_process_dead(old.pid, self._metrics.name)  # type: ignore[no-untyped-call]
        self._starts[name] += 1
        words = (sys.executable, "-m", "dualpath.cli.main", *self._commands[name])
        shared = {SHARED_METRICS: self._metrics.name} if is_front_end else {}
        process = SpawnedProcess(name, words, None, {**self._environment, **shared})
        self._supervisor.add(process, ends_last=not is_front_end)


def scheduler_command(
    settings: RouterSettings, host: str, adapters: Mapping[str, str]
) -> list[str]:
    """Return the words after ``dualpath`` that start the scheduler."""
    address = SchedulerAddress(host, settings.cluster_port, dict(adapters))
    own = _without(settings, (*FRONT_ENDS_OWN, "api_keys"))
    return [SCHEDULER, *arguments(address), *arguments(own)]


def _link(settings: RouterSettings, index: int) -> LinkSettings:
    host = _ANYWHERE.get(settings.control_host, settings.control_host)
    return LinkSettings(
        scheduler=f"tcp://{host}:{settings.front_ends_port}",
        # The next process of the name tells the scheduler that the one before is gone.
        front_end_name=f"{socket.gethostname()}-front-{index}",
        share_port=True,
    )


def _without(settings: RouterSettings, names: Sequence[str]) -> RouterSettings:
    """Return the settings with some of them as they are by default."""
    defaults = {field.name: field.default for field in declared(RouterSettings)}
    return msgspec.structs.replace(settings, **{name: defaults[name] for name in names})


def _environment(settings: RouterSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without settings, which are all said as flags; keys alone are not."""
    kept = {
        name: value
        for name, value in environment.items()
        if (not name.startswith(PREFIX) or name in OTHER_VARIABLES) and name != SHARED_METRICS
    }
    keys = msgspec.json.encode(settings.api_keys).decode()
    return {**kept, variable("router", "api_keys"): keys} if settings.api_keys else kept


def _with_ports(settings: RouterSettings, host: str) -> RouterSettings:
    """Choose what is left to chance: processes that start again must be found again."""
    chosen = {
        name: claim_port(where)
        for name, where in (
            ("control_port", settings.control_host),
            ("front_ends_port", settings.control_host),
            ("cluster_port", host),
        )
        if not getattr(settings, name)
    }
    return msgspec.structs.replace(settings, **chosen)
