"""Runs a router as several processes, for commands; see ``ops.launch.scaled_router``."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from dualpath.cli.signals import sigterm_as_interrupt, watch_until_stopped
from dualpath.core.addresses import http_url

if TYPE_CHECKING:
    from dualpath.router.settings import LinkSettings, RouterSettings

#: Returns the arguments after ``dualpath`` of a front end with these settings, link and port.
FrontEndCommand = Callable[["RouterSettings", "LinkSettings", int], Sequence[str]]


def run_scaled_router(
    settings: "RouterSettings",
    host: str,
    port: int,
    front_end: FrontEndCommand,
    adapters: Mapping[str, str] = MappingProxyType({}),
    *,
    certificate: str = "",
    key: str = "",
) -> int:
    """Run scheduler and front ends until Ctrl-C, or after SIGTERM until they have drained.

    With a ``certificate`` and its ``key``, which are PEM files, front ends and scheduler speak
    HTTPS.  Returns 0.  Raises ``ConfigError`` if an address is in use; no process is left running
    then.
    """
    from dualpath.launch.scaled_router import ScaledRouter, client_port

    with sigterm_as_interrupt():
        try:
            with (
                client_port(host, port) as number,
                ScaledRouter(
                    settings,
                    host,
                    lambda own, link: front_end(own, link, number),
                    adapters,
                    certificate=certificate,
                    key=key,
                ) as processes,
            ):
                endpoint = http_url(host, number, tls=bool(certificate))
                _say(
                    f"{settings.front_ends} front ends at {endpoint}/v1, "
                    f"cluster at {', '.join(processes.cluster_urls)}, engines register at "
                    f"{', '.join(processes.control_addresses)}"
                )
                watch_until_stopped(processes, _say)
        except KeyboardInterrupt:
            _say("stopped")
    return 0


def _say(text: str) -> None:
    print(f"dualpath: {text}", flush=True)
