"""`dualpath roles`: prints or changes the roles of engines while they serve."""

import argparse
import time
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from dualpath.cli.output import add_json_argument, wrote_json
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.cluster import Role, nodes_text, parse_nodes
from dualpath.core.errors import BadRequestError, ConfigError, DeadlineError, EngineLostError
from dualpath.core.settings import Setting, Settings
from dualpath.node.certificates import CaFile

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_S = 0.5
_DESCRIPTION = """Print the roles of a cluster's engines, or change them and the sizes of
data-parallel groups. An engine or group drains, is restarted by its supervisor, and rejoins; no
request fails. One engine or group changes at a time, and the last one of a role never does. For
scheduled changes, run it with --nodes from cron or a timer. VLLM_API_KEY is the API key, if
any."""


class RolesSettings(Settings, frozen=True, kw_only=True):
    """The router, and the requested changes."""

    endpoint: Annotated[str, Setting("http://host:port of the router", metavar="URL")] = (
        "http://127.0.0.1:8000"
    )
    ca_file: CaFile = ""
    set: Annotated[
        dict[str, Role], Setting("engines and their new roles", metavar="ENGINE=ROLE,…")
    ] = msgspec.field(default_factory=dict)
    ranks: Annotated[
        dict[str, int],
        Setting(
            "groups and their new numbers of ranks; applied together with {set} of the same group",
            metavar="GROUP=N,…",
        ),
    ] = msgspec.field(default_factory=dict)
    nodes: Annotated[
        str,
        Setting("change roles until there are x prefill, y decode; empty: none", metavar="xPyD"),
    ] = ""
    wait_s: Annotated[float, Setting("timeout of each change", gt=0)] = 900.0

    def check(self) -> None:
        """Raise ``ConfigError`` for invalid nodes, and for groups without a rank."""
        super().check()
        if self.nodes:
            parse_nodes(self.nodes)
        for name, ranks in self.ranks.items():
            if ranks < 1:
                raise ConfigError(f"{{ranks}} has {name}={ranks}; must be at least 1")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath roles`."""
    parser = subparsers.add_parser(
        "roles",
        help="print or change the roles of engines while they serve",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    add_json_argument(parser)
    add_settings(parser, RolesSettings)


def run(args: argparse.Namespace) -> int:
    """Apply the requested changes, then print the roles; returns 0.

    Raises:
        ConfigError: the router refuses a change, or ``nodes`` does not match the cluster.
        EngineLostError: the router does not answer, or an engine did not rejoin in time.
        DeadlineError: a change did not end within ``wait_s``.
    """
    settings = flag_settings(args, RolesSettings)
    call = _caller(settings.endpoint, settings.ca_file)
    for engine_id in dict.fromkeys((*settings.set, *settings.ranks)):
        request = {"role": settings.set.get(engine_id), "ranks": settings.ranks.get(engine_id)}
        _change(call, {"engine_id": engine_id, **request}, settings.wait_s)
    if settings.nodes:
        _divide(call, settings.nodes, settings.wait_s)
    report = call(None)
    if not wrote_json(args, report):
        print("\n".join(lines(report)))
    return 0


def lines(report: dict[str, Any]) -> list[str]:
    """Return the lines to print: numbers per role, the running switch, earlier switches."""
    shown = [nodes_text(report["prefill"], report["decode"])]
    if report["cost_s"] is not None:
        shown.append(f"a switch takes {report['cost_s']:.1f} s (median of the switches below)")
    for switch in [*([report["switch"]] if report["switch"] else []), *reversed(report["past"])]:
        took = "" if switch["took_s"] is None else f" after {switch['took_s']:.1f} s"
        note = f": {switch['note']}" if switch["note"] else ""
        names, size = ", ".join(switch["engines"]), switch["to_ranks"]
        to = switch["to_role"] if size is None else f"{switch['to_role']} with {size} ranks"
        shown.append(f"{names} to {to} ({switch['reason']}): {switch['state']}{took}{note}")
    return shown


def _divide(call: "Callable[[object], dict[str, Any]]", nodes: str, wait_s: float) -> None:
    prefill, decode = parse_nodes(nodes)
    report = call(None)
    if prefill + decode != report["prefill"] + report["decode"]:
        raise ConfigError(
            f"{{nodes}} is {nodes}, and the cluster is "
            f"{nodes_text(report['prefill'], report['decode'])}; give the same total"
        )
    more = prefill - report["prefill"]
    role = Role.PREFILL if more > 0 else Role.DECODE
    for _ in range(abs(more)):
        _change(call, {"role": role.value}, wait_s)


def _change(
    call: "Callable[[object], dict[str, Any]]", request: dict[str, object], wait_s: float
) -> None:
    asked = call(request)
    deadline_s = time.monotonic() + wait_s
    while (report := call(None))["switch"] is not None:
        if time.monotonic() > deadline_s:
            raise DeadlineError(
                f"{', '.join(asked['engines'])} is {report['switch']['state']} after {wait_s:g} s; "
                "check again with `dualpath roles`, or wait longer with {wait_s}"
            )
        time.sleep(_POLL_S)
    ended = next((s for s in reversed(report["past"]) if s["engines"] == asked["engines"]), None)
    if ended is None:
        raise EngineLostError(
            f"the router was restarted while {', '.join(asked['engines'])} changed its role; "
            "check the roles with `dualpath roles`"
        )
    if ended["state"] != "joined":
        raise EngineLostError(f"{', '.join(ended['engines'])}: {ended['note']}")


def _caller(endpoint: str, ca_file: str) -> "Callable[[object], dict[str, Any]]":
    """Return a function that GETs the roles (None) or POSTs a request, with the API key."""
    from dualpath.node.certificates import trusting
    from dualpath.router.api_keys import client_headers
    from dualpath.router.scheduler.role_calls import call_roles

    tls = trusting(ca_file)

    def call(request: object) -> dict[str, Any]:
        try:
            return call_roles(endpoint, client_headers(()), request, tls)
        except BadRequestError as error:
            raise ConfigError(str(error)) from error

    return call
