"""`dualpath weights`: changes the weights of all engines for a trainer, or lets them sleep."""

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from dualpath.cli.output import add_json_argument, wrote_json
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.errors import BadRequestError, ConfigError, DeadlineError, EngineLostError
from dualpath.core.settings import Setting, Settings
from dualpath.node.certificates import CaFile

if TYPE_CHECKING:
    from collections.abc import Callable

_POLL_S = 0.2
#: The answer may be later than the operation's own limit.
_GRACE_S = 5.0
_SHOW, _UPDATE = "show", "update"
_ACTIONS = (_SHOW, _UPDATE, "sleep", "wake_up", "resume")
_DESCRIPTION = """Print the version of the weights of a cluster's engines, or, for a trainer, change
the weights of all of them (update), let them sleep and wake them up. Requests wait meanwhile. If an
engine fails, requests go on waiting; repeat the update with the --version that it printed, or let
engines serve as they are (resume). Engines need rollouts (`dualpath serve --rollouts`).
VLLM_API_KEY is the API key, if any."""


class WeightsSettings(Settings, frozen=True, kw_only=True):
    """The router, and the requested operation."""

    endpoint: Annotated[str, Setting("http://host:port of the router", metavar="URL")] = (
        "http://127.0.0.1:8000"
    )
    ca_file: CaFile = ""
    label: Annotated[
        str, Setting("update: name of the new weights, such as step-7; a nonce is added")
    ] = ""
    version: Annotated[
        str, Setting("update: the version that an update has printed which is to be repeated")
    ] = ""
    reload: Annotated[
        str,
        Setting(
            "update: let engines load these weights from a folder of theirs or the hub, by vLLM's "
            "reload_weights",
            metavar="MODEL",
        ),
    ] = ""
    calls: Annotated[
        str,
        Setting(
            "update: JSON file with vLLM's calls at each engine, in order, each with path and body",
            metavar="FILE",
        ),
    ] = ""
    running: Annotated[
        str, Setting("what becomes of running requests: wait for them, abort or keep them")
    ] = "wait"
    level: Annotated[int, Setting("sleep: vLLM's level; 2 discards the weights", ge=1, le=2)] = 1
    tags: Annotated[
        tuple[str, ...], Setting("wake_up: memory to wake up; empty: all", metavar="TAG,…")
    ] = ()
    without: Annotated[
        tuple[str, ...], Setting("engines that are left out and stay out", metavar="ENGINE,…")
    ] = ()
    wait_s: Annotated[float, Setting("timeout of the operation", gt=0, le=86400)] = 600.0

    def request(self, action: str) -> dict[str, object]:
        """Return the body of the call; raises ``ConfigError`` for a file that is no JSON list."""
        calls: list[dict[str, object]] = []
        if self.reload:
            body = {"method": "reload_weights", "kwargs": {"weights_path": self.reload}}
            calls.append({"path": "/collective_rpc", "body": body})
        if self.calls:
            try:
                content = Path(self.calls).read_bytes()
                calls += msgspec.json.decode(content, type=list[dict[str, Any]])
            except (OSError, msgspec.DecodeError) as error:
                raise ConfigError(
                    f"{{calls}} is {self.calls}: {error}; give a JSON list of objects with path "
                    "and body"
                ) from error
        return {
            "action": action,
            "running": self.running,
            "label": self.label,
            "version": self.version,
            "calls": calls,
            "level": self.level,
            "tags": self.tags,
            "without": self.without,
            "timeout_s": self.wait_s,
        }


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath weights`."""
    parser = subparsers.add_parser(
        "weights",
        help="change the weights of all engines for a trainer, or let them sleep",
        description=_DESCRIPTION,
        allow_abbrev=False,
    )
    parser.add_argument(
        "action", nargs="?", choices=_ACTIONS, default=_SHOW, help="what to do (default: show)"
    )
    add_json_argument(parser)
    add_settings(parser, WeightsSettings)


def run(args: argparse.Namespace) -> int:
    """Begin the operation and wait until it is over, then print the state; returns 0.

    Raises:
        ConfigError: the router refuses the operation.
        EngineLostError: the router does not answer, or an engine failed.
        DeadlineError: the operation is not over after ``wait_s``.
    """
    settings = flag_settings(args, WeightsSettings)
    request = None if args.action == _SHOW else settings.request(args.action)
    call = _caller(settings.endpoint, settings.ca_file)
    report = call(request)
    if request is not None:
        report = _finished(call, report, settings.wait_s)
    if not wrote_json(args, report):
        print("\n".join(lines(report)))
    return 0


def lines(report: dict[str, Any]) -> list[str]:
    """Return the lines to print."""
    shown = [f"{report['state']} for {report['for_s']:.1f} s, engines have {report['shown']}"]
    if report["version"]:
        shown.append(f"version of the last {report['action']}: {report['version']}")
    if report["error"]:
        shown.append(f"failed: {report['error']}")
    for name, weights in report["outdated"].items():
        shown.append(f"{name} is refused: it has {weights}")
    return shown


def _finished(
    call: "Callable[[object], dict[str, Any]]", report: dict[str, Any], wait_s: float
) -> dict[str, Any]:
    deadline_s = time.monotonic() + wait_s + _GRACE_S
    while report["under_way"]:
        if time.monotonic() > deadline_s:
            raise DeadlineError(
                f"the cluster is {report['state']} after {wait_s:g} s; check again with `dualpath "
                "weights`, or wait longer with {wait_s}"
            )
        time.sleep(_POLL_S)
        report = call(None)
    if report["error"]:
        raise EngineLostError(report["error"])
    return report


def _caller(endpoint: str, ca_file: str) -> "Callable[[object], dict[str, Any]]":
    """Return a function that GETs the state (None) or POSTs a request, with the API key."""
    from dualpath.node.certificates import trusting
    from dualpath.router.api_keys import client_headers
    from dualpath.router.scheduler.role_calls import call_roles
    from dualpath.router.scheduler.weights import WEIGHTS_PATH

    tls = trusting(ca_file)

    def call(request: object) -> dict[str, Any]:
        try:
            return call_roles(endpoint, client_headers(()), request, tls, WEIGHTS_PATH)
        except BadRequestError as error:
            raise ConfigError(str(error)) from error

    return call
