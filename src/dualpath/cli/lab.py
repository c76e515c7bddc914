"""`dualpath lab`: an emulated cluster on this machine, with shaped links per node."""

import argparse
from typing import TYPE_CHECKING

from dualpath.cli.lab_experiments import (
    add_bench_parser,
    add_run_parser,
    run_experiment,
)
from dualpath.cli.output import add_json_argument, print_progress, wrote_json
from dualpath.cli.settings import LAB, Part, add_parts, add_settings, configuration, flag_settings
from dualpath.cli.termination import sigterm_as_interrupt
from dualpath.laboratory.lab.settings import LabSettings
from dualpath.report.model import Notes, Table

if TYPE_CHECKING:
    from dualpath.laboratory.lab.cluster import LabState

PARTS = (Part(LAB),)

_DESCRIPTION = """An emulated cluster on this machine: nodes are network namespaces whose compute
NICs share a switch; every link is shaped to its rate, with a lane for inference and one for KV, and
storage reads are throttled per node. `run` and `bench` create their own lab and remove it."""
_EPILOG = """\
dualpath lab up --nodes 1P2D --cnic-bytes-per-s 1Gbit --snic-bytes-per-s 50MB
dualpath lab down
dualpath lab run --nodes 1P2D --mode basic,dualpath,oracle
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parsers of `dualpath lab`."""
    parser = subparsers.add_parser(
        "lab",
        help="emulate a cluster on this machine: nodes with shaped compute and storage NICs",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    up = actions.add_parser(
        "up", help="create a lab", description="Create a lab and print its nodes and links."
    )
    status = actions.add_parser(
        "status",
        help="print nodes and links of a lab",
        description="Print nodes and links of a lab.",
    )
    down = actions.add_parser(
        "down",
        help="remove a lab",
        description="Remove everything of a lab, including leftovers of a crash, and kill the "
        "processes on its nodes.",
    )
    up.add_argument("--dry-run", action="store_true", help="print the steps and exit")
    for action in (up, status):
        add_json_argument(action)
    add_parts(up, PARTS)
    for action in (status, down):
        add_settings(action, LabSettings, only=("name",))
    add_run_parser(actions)
    add_bench_parser(actions)


def run(args: argparse.Namespace) -> int:
    """Run the action; return 0.

    Raises:
        ConfigError: invalid settings, a lab of that name that exists already or does not exist,
            or a step that the kernel refuses.
    """
    if args.action in ("run", "bench"):
        return run_experiment(args)

    from dualpath.laboratory.lab.cluster import lab_down, lab_status

    if args.action == "up":
        return _up(configuration(args, PARTS).settings(LAB, LabSettings), args)
    name = flag_settings(args, LabSettings).name
    if args.action == "status":
        _print(lab_status(name), args)
        return 0
    removed = lab_down(name)
    print_progress(f"lab {name!r} removed: {removed or 'nothing to remove'}")
    return 0


def _up(settings: LabSettings, args: argparse.Namespace) -> int:
    from dualpath.laboratory.lab.cluster import lab_up
    from dualpath.laboratory.lab.machine import find_machine
    from dualpath.laboratory.lab.runner import describe
    from dualpath.laboratory.lab.steps import make_steps

    if args.dry_run:
        for step in make_steps(settings, find_machine(settings)):
            print(describe(step))
        return 0
    # SIGTERM raises an exception, which removes the partly created lab.
    with sigterm_as_interrupt():
        state = lab_up(settings)
    _print(state, args)
    return 0


def _print(state: "LabState", args: argparse.Namespace) -> None:
    from dualpath.laboratory.lab.cluster import lab_nodes, link_reports, storage_url

    settings, machine = state.settings, state.machine
    found = {
        "settings": settings,
        "shaping": machine.shaping,
        "storage": storage_url(state),
        "nodes": lab_nodes(state),
        "links": link_reports(state),
    }
    if wrote_json(args, found):
        return
    from dualpath.report.text import print_blocks

    head = (
        f"lab {settings.name}: {settings.nodes}, shaping {machine.shaping.value}",
        f"storage {storage_url(state)}",
    )
    nodes = tuple((node.name, node.address) for node in lab_nodes(state))
    links = tuple(
        (link.link, _rate(link.bytes_per_s), "yes" if link.shaped else "NO", link.how)
        for link in link_reports(state)
    )
    print_blocks(
        Notes(head),
        Table("", ("node", "address"), nodes),
        Table("", ("link", "rate per node", "shaped", "how"), links),
    )


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s = {bytes_per_s * 8 / 1e9:g} Gbit/s"
