"""`dualpath qos`: what to set on a fabric so that KV never delays model communication (A.1)."""

import argparse
import textwrap
from typing import TYPE_CHECKING

from dualpath.cli.output import FORMATS, JSON, TEXT, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualpath.ops.fabric_settings import FabricLanes, SettingsGroup

_WIDTH = 100
_FABRICS = ("infiniband", "roce", "ethernet")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath qos`."""
    parser = subparsers.add_parser(
        "qos",
        help="print the settings that keep KV from delaying model communication",
        description="Prints the settings of the paper's §A.1 for a fabric, line by line with the "
        "reason: inference traffic gets a lane with nearly all of the bandwidth reserved, KV one "
        "with the rest, and either may use what the other leaves. Nothing is changed; lines that "
        "begin with # are explanation.",
        allow_abbrev=False,
    )
    parser.add_argument("--fabric", choices=_FABRICS, required=True, help="the compute network")
    parser.add_argument(
        "--ratio", default="99:1", metavar="INFERENCE:KV", help="reserved shares of a full link"
    )
    for name, what, inference, kv in (
        ("sl", "service level and lane, 0 to 3 (infiniband)", 1, 2),
        ("dscp", "DSCP value, 16 to 47 (roce)", 34, 26),
    ):
        for lane, default in (("inference", inference), ("kv", kv)):
            parser.add_argument(
                f"--{lane}-{name}", type=int, default=default, metavar="N", help=f"{what} of {lane}"
            )
    parser.add_argument(
        "--kv-ports", default="20480-24575", metavar="A-B", help="TCP ports of KV (ethernet)"
    )
    parser.add_argument(
        "--interface", default="eth0", metavar="NAME", help="of the compute NIC (roce, ethernet)"
    )
    parser.add_argument("--rdma-device", default="mlx5_0", metavar="NAME", help="the NIC (roce)")
    parser.add_argument(
        "--gbit-per-s", type=float, default=10.0, metavar="N", help="of the NIC (ethernet)"
    )
    parser.add_argument("--format", choices=FORMATS, default=TEXT, help="what to print")


def run(args: argparse.Namespace) -> int:
    """Print the settings; return 0.

    Raises:
        ConfigError: a ratio, level, value or range that the fabric does not have.
    """
    from dualpath.ops.fabric_settings import Fabric, fabric_settings

    fabric, lanes = Fabric(args.fabric), _lanes(args)
    groups = fabric_settings(fabric, lanes)
    if args.format == JSON:
        found = {"fabric": fabric, "lanes": lanes, "groups": groups}
        print_json(found)
        return 0
    print(f"# Traffic isolation on {fabric.value}, inference : KV = {lanes.weights.text}")
    for line in _lines(groups):
        print(line)
    return 0


def _lanes(args: argparse.Namespace) -> "FabricLanes":
    from dualpath.core.errors import ConfigError
    from dualpath.ops.fabric_settings import FabricLanes
    from dualpath.plan.traffic_class import parse_ports, parse_weights

    for option, name in (("--interface", args.interface), ("--rdma-device", args.rdma_device)):
        # The name ends up in commands that somebody pastes into a shell.
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum():
            raise ConfigError(f"{option} is {name!r}, must be the name of a device; correct it")
    return FabricLanes(
        weights=parse_weights(args.ratio),
        inference_sl=args.inference_sl,
        kv_sl=args.kv_sl,
        inference_dscp=args.inference_dscp,
        kv_dscp=args.kv_dscp,
        kv_ports=parse_ports(args.kv_ports),
        interface=args.interface,
        rdma_device=args.rdma_device,
        bytes_per_s=args.gbit_per_s * 1e9 / 8,
    )


def _lines(groups: "Sequence[SettingsGroup]") -> list[str]:
    lines = []
    for group in groups:
        lines += ["", f"## {group.where}"]
        for setting in group.settings:
            lines += textwrap.wrap(
                setting.why, _WIDTH, initial_indent="# ", subsequent_indent="#   "
            )
            if setting.line:
                lines.append(setting.line)
    return lines
