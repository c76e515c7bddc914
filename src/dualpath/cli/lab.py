"""`dualpath lab`: a cluster on this machine, each node with shaped links."""

import argparse
import signal
import sys
from typing import TYPE_CHECKING, Any

from dualpath.cli.tables import FORMATS, JSON, TEXT, print_table

if TYPE_CHECKING:
    from dualpath.lab.cluster import LabState
    from dualpath.lab.settings import LabSettings

_DESCRIPTION = """`up` makes prefill and decode nodes on this machine: network namespaces whose
compute NICs share a switch, every link shaped to its rate with a lane for inference and one for KV,
and storage whose reads are throttled per node. `status` tells how its links are shaped. `down`
removes everything, also what a crash has left, and kills processes on the nodes."""
_EPILOG = """\
dualpath lab up --nodes 1P2D --cnic-gbit-per-s 1 --snic-mb-per-s 50
dualpath lab down
"""
#: Options of `up`: argument, key of the settings, factor from the argument's unit to the key's.
_RATES = (
    ("cnic_gbit_per_s", "cnic_bytes_per_s", 1e9 / 8),
    ("loopback_gbit_per_s", "loopback_bytes_per_s", 1e9 / 8),
    ("snic_mb_per_s", "snic_bytes_per_s", 1e6),
)
_PLAIN = ("ratio", "kv_ports", "storage", "shaping")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath lab`."""
    parser = subparsers.add_parser(
        "lab",
        help="a cluster on this machine: nodes with shaped compute and storage NICs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=("up", "status", "down"), help="what to do")
    parser.add_argument("--name", metavar="NAME", help="tells labs apart; without it: lab")
    parser.add_argument("--format", choices=FORMATS, default=TEXT, help="what up and status print")
    made = parser.add_argument_group("what `up` makes; overrides --config")
    made.add_argument("--config", metavar="FILE.toml", help="settings of the lab")
    made.add_argument("--nodes", metavar="xPyD", help="prefill and decode nodes; without it: 1P1D")
    made.add_argument("--cnic-gbit-per-s", type=float, metavar="N", help="of a node, either way")
    made.add_argument("--loopback-gbit-per-s", type=float, metavar="N", help="of a node to itself")
    made.add_argument("--snic-mb-per-s", type=float, metavar="N", help="storage reads of a node")
    made.add_argument("--ratio", metavar="INFERENCE:KV", help="of the lanes; without it: 99:1")
    made.add_argument("--kv-ports", metavar="A-B", help="TCP ports of the KV lane")
    made.add_argument(
        "--storage", metavar="DIR", help="on a disk; without it a file system in memory"
    )
    made.add_argument("--image-mb", type=int, metavar="N", help="size of that file system")
    made.add_argument(
        "--shaping",
        choices=("auto", "root", "user-namespaces", "token-buckets"),
        help="who shapes the links; auto is the first of the others that is allowed",
    )
    made.add_argument("--dry-run", action="store_true", help="print the steps and exit")


def run(args: argparse.Namespace) -> int:
    """Do it; return 0.

    Raises:
        ConfigError: settings no lab can have, a lab of that name where there is one already, or
            none where there should be, a step that the kernel refuses.
    """
    from dualpath.lab.cluster import lab_down, lab_status

    settings = _settings(args)
    if args.action == "up":
        return _up(settings, args)
    if args.action == "status":
        _print(lab_status(settings.name), args.format)
        return 0
    removed = lab_down(settings.name)
    _say(f"lab {settings.name!r} removed: {removed or 'nothing was there'}")
    return 0


def _settings(args: argparse.Namespace) -> "LabSettings":
    from dualpath.core.errors import ConfigError
    from dualpath.lab.settings import load_settings, parse_shape

    changes: dict[str, Any] = {key: getattr(args, key) for key in _PLAIN}
    changes |= {
        key: None if getattr(args, option) is None else getattr(args, option) * factor
        for option, key, factor in _RATES
    }
    if args.nodes is not None:
        changes["prefill"], changes["decode"] = parse_shape(args.nodes)
    if args.image_mb is not None:
        changes["image_bytes"] = args.image_mb * 10**6
    changes = {key: value for key, value in changes.items() if value is not None}
    if args.action != "up" and (changes or args.dry_run):
        raise ConfigError(f"`lab {args.action}` takes a --name and no settings; leave them out")
    if args.name is not None:
        changes["name"] = args.name
    return load_settings(args.config or "", changes)


def _up(settings: "LabSettings", args: argparse.Namespace) -> int:
    from dualpath.lab.cluster import lab_up
    from dualpath.lab.machine import find_machine
    from dualpath.lab.runner import describe
    from dualpath.lab.steps import make_steps

    if args.dry_run:
        for step in make_steps(settings, find_machine(settings)):
            print(describe(step))
        return 0
    # An end by signal is an exception, which undoes what has been made.
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        state = lab_up(settings)
    finally:
        signal.signal(signal.SIGTERM, previous)
    _print(state, args.format)
    return 0


def _print(state: "LabState", form: str) -> None:
    from dualpath.lab.cluster import lab_nodes, link_reports

    settings, machine = state.settings, state.machine
    if form == JSON:
        import msgspec

        found = {
            "settings": settings,
            "shaping": machine.shaping,
            "storage": machine.storage,
            "nodes": lab_nodes(state),
            "links": link_reports(state),
        }
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
        return
    print(f"lab {settings.name}: {settings.shape}, shaping {machine.shaping.value}")
    print(f"storage {machine.storage}\n")
    print_table(("node", "address"), [(node.name, node.address) for node in lab_nodes(state)])
    print()
    rows = [
        (report.link, _rate(report.bytes_per_s), "yes" if report.shaped else "NO")
        for report in link_reports(state)
    ]
    print_table(("link", "rate per node", "shaped"), rows)
    print()
    for report in link_reports(state):
        print(f"{report.link}: {report.how}")


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s = {bytes_per_s * 8 / 1e9:g} Gbit/s"


def _say(text: str) -> None:
    print(f"dualpath: {text}", file=sys.stderr, flush=True)


def _interrupt(signal_number: int, frame: object) -> None:
    raise KeyboardInterrupt
