"""A router as several processes of this machine: schedulers, and front ends on one port.

There is one scheduler, or with ``units`` several, each with engines of its own.
The kernel distributes connections over the front ends (SO_REUSEPORT), each with its own accept
queue.  This process only supervises: a front end that exits loses its own streams and is restarted
while the others serve; a scheduler is restarted too, and front ends and engines reconnect to it.
"""

import contextlib
import fcntl
import os
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from dualpath.core.addresses import HostPort, http_url, seen_from_here, tcp_endpoint
from dualpath.core.errors import ConfigError
from dualpath.core.settings import OTHER_VARIABLES, PREFIX, arguments, declared, variable
from dualpath.launch.ports import claim_port, free_port
from dualpath.launch.process import DRAIN_GUARD_S, Restarts, SpawnedProcess, Supervisor
from dualpath.node.sockets import resolved
from dualpath.router.observe.metrics import SHARED_METRICS, metrics_writer
from dualpath.router.setting_owners import FRONT_ENDS_OWN, SCHEDULERS_OWN
from dualpath.router.settings import (
    UNIT_PORTS_APART,
    LinkSettings,
    RouterSettings,
    SchedulerAddress,
)

SCHEDULER = "scheduler"
#: Exit code of a command with invalid arguments or settings.
EXIT_REFUSED = 2
_POLL_S = 0.05
_METRICS_PREFIX, _LOCK = "dualpath-metrics-", "lock"


@contextmanager
def client_port(host: str, port: int) -> Iterator[int]:
    """Reserve the port that front ends share during the ``with`` block; yields its number.

    The socket is bound but does not listen, so that it receives no connections.  Raises
    ``ConfigError`` if the port is in use.
    """
    try:
        family, address = resolved(host, listens=True)
    except OSError as error:
        raise _cannot_listen(host, port, error) from error
    with socket.socket(family) as reserved:
        try:
            # Check without SO_REUSEPORT first, which would share with other servers of this user.
            number = free_port(host, port)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            reserved.bind((address, number))
        except OSError as error:
            raise _cannot_listen(host, port, error) from error
        yield number


def _cannot_listen(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot listen on {HostPort(host, port)}: {error.strerror}; free it or choose another "
        "with --host and --port"
    )


class MetricsFolder:
    """The folder in which front ends share their metrics: each answers scrapes for all.

    The folder of a killed router stays.  The next router of the same user removes it, as no
    process holds the lock in it.
    """

    def __init__(self) -> None:
        self._remove_unused()
        self._folder = tempfile.TemporaryDirectory(prefix=_METRICS_PREFIX)
        self.path = self._folder.name
        new = os.path.join(self.path, "new")
        self._lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Another router that starts now finds no lock, or one that is taken.
        os.rename(new, os.path.join(self.path, _LOCK))

    def cleanup(self) -> None:
        """Remove the folder; idempotent."""
        self._folder.cleanup()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @staticmethod
    def _remove_unused() -> None:
        found: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
            found = [entry for entry in entries if entry.name.startswith(_METRICS_PREFIX)]
        for folder in found:
            try:
                if folder.stat(follow_symlinks=False).st_uid != os.geteuid():
                    continue
                flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW
                lock = os.open(os.path.join(folder.path, _LOCK), flags)
            except OSError:  # not a folder of this kind, or removed meanwhile
                continue
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder.path, ignore_errors=True)
            except BlockingIOError:
                continue
            finally:
                os.close(lock)


class ScaledRouter:
    """The processes of ``settings.front_ends`` > 0; a context manager that stops them.

    ``front_end`` returns the arguments after ``dualpath`` of a front end with these settings and
    this link.  ``adapters`` maps the adapters that clients may name to their paths.  Ports of 0 are
    chosen once.  With a ``certificate`` and ``key`` the schedulers' own ports speak HTTPS.  Exits
    and restarts are logged.  ``control_addresses`` and ``cluster_urls`` are those of each unit.
    """

    def __init__(
        self,
        settings: RouterSettings,
        host: str,
        front_end: Callable[[RouterSettings, LinkSettings], Sequence[str]],
        adapters: Mapping[str, str] = MappingProxyType({}),
        *,
        certificate: str = "",
        key: str = "",
    ) -> None:
        units = unit_settings(settings, host)
        self.control_addresses = [tcp_endpoint(u.control_host, u.control_port) for u in units]
        self.cluster_urls = [
            http_url(seen_from_here(host), unit.cluster_port, tls=bool(certificate))
            for unit in units
        ]
        self._metrics = MetricsFolder()
        self._environment = _environment(settings, os.environ)
        self._commands: dict[str, Sequence[str]] = {}
        #: Names of front ends at the scheduler, by the names of their processes.
        self._front_ends: dict[str, str] = {}
        for number, unit in enumerate(units):
            name = SCHEDULER if len(units) == 1 else f"{SCHEDULER}-{number}"
            address = SchedulerAddress(
                host, unit.cluster_port, certificate, key, lora_modules=dict(adapters)
            )
            self._commands[name] = scheduler_command(unit, address)
        for index in range(settings.front_ends):
            link = _link(units, index)
            self._front_ends[f"front-end-{index}"] = link.front_end_name
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
        """Stop all processes; after an error or Ctrl-C running requests end with an error."""
        self._supervisor.end(interrupt=error is not None)
        self._metrics.cleanup()

    def watch(self) -> None:
        """Restart processes that exit; never returns.

        Raises ``ConfigError`` if a process refuses its settings at its first start.
        """
        while True:
            for process in self._supervisor.processes:
                if process.exit_code == EXIT_REFUSED and self._starts[process.name] == 1:
                    raise ConfigError(f"{process.name} cannot be started; see its error above")
            self._restarts.poll(self._supervisor.processes, time.monotonic())
            time.sleep(_POLL_S)

    def drain(self) -> None:
        """Accept no new requests; return when running requests and front ends have ended."""
        fronts = [p for p in self._supervisor.processes if p.name in self._front_ends]
        for process in fronts:
            process.terminate()
        until_s = time.monotonic() + DRAIN_GUARD_S
        # Restart schedulers that exit meanwhile, but no front end.
        while any(p.alive for p in fronts) and time.monotonic() < until_s:
            now = self._supervisor.processes
            schedulers = [p for p in now if p.name not in self._front_ends]
            self._restarts.poll(schedulers, time.monotonic())
            time.sleep(_POLL_S)

    def _start(self, name: str) -> None:
        is_front_end = name in self._front_ends
        if is_front_end and self._starts[name]:
            # Its counters go on; its gauges of running requests are removed.
            mark_process_dead(  # type: ignore[no-untyped-call]
                metrics_writer(self._front_ends[name]), self._metrics.path
            )
        self._starts[name] += 1
        command = (sys.executable, "-m", "dualpath.cli.main", *self._commands[name])
        shared = {SHARED_METRICS: self._metrics.path} if is_front_end else {}
        process = SpawnedProcess(name, command, None, {**self._environment, **shared})
        self._supervisor.add(process, ends_last=not is_front_end)


def scheduler_command(settings: RouterSettings, address: SchedulerAddress) -> list[str]:
    """Return the arguments after ``dualpath`` of the scheduler."""
    own = _without(settings, (*FRONT_ENDS_OWN, "api_keys"))
    return [SCHEDULER, *arguments(address), *arguments(own)]


def _link(units: Sequence[RouterSettings], index: int) -> LinkSettings:
    addresses = []
    for unit in units:
        assert unit.front_ends_port is not None, "chosen by unit_settings"
        addresses.append(tcp_endpoint(seen_from_here(unit.control_host), unit.front_ends_port))
    return LinkSettings(
        scheduler=",".join(addresses),
        # A restarted process of this name replaces the previous one at the scheduler.
        front_end_name=f"{socket.gethostname()}-front-{index}",
        share_port=True,
    )


def _without(settings: RouterSettings, names: Sequence[str]) -> RouterSettings:
    """Return the settings with ``names`` reset to their defaults."""
    defaults = {field.name: field.default for field in declared(RouterSettings)}
    return msgspec.structs.replace(settings, **{name: defaults[name] for name in names})


def _environment(settings: RouterSettings, environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without settings, which are passed as flags, but with API keys."""
    kept = {
        name: value
        for name, value in environment.items()
        if (not name.startswith(PREFIX) or name in OTHER_VARIABLES) and name != SHARED_METRICS
    }
    keys = msgspec.json.encode(settings.api_keys).decode()
    return {**kept, variable("router", "api_keys"): keys} if settings.api_keys else kept


def unit_settings(settings: RouterSettings, host: str) -> list[RouterSettings]:
    """Return the settings of each unit's scheduler, with the unit's ports and event log.

    Ports of 0 are chosen now, so that restarted processes have the same ports.
    """
    return [_of_unit(settings, host, unit) for unit in range(settings.units)]


def _of_unit(settings: RouterSettings, host: str, unit: int) -> RouterSettings:
    ports = {}
    for name, where in (
        ("control_port", settings.control_host),
        ("front_ends_port", settings.control_host),
        ("cluster_port", host),
    ):
        first = getattr(settings, name)
        ports[name] = first + unit * UNIT_PORTS_APART if first else claim_port(where)
    changes: dict[str, int | str] = {"units": 1, **ports}
    if settings.event_log and settings.units > 1:
        log = Path(settings.event_log)
        changes["event_log"] = str(log.with_name(f"unit-{unit}-{log.name}"))
    return msgspec.structs.replace(settings, **changes)
