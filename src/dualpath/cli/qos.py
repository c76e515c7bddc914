"""`dualpath qos`: network settings that keep KV from delaying model communication (A.1)."""

import argparse
import textwrap
from typing import TYPE_CHECKING, Annotated

from dualpath.cli.output import add_json_argument, wrote_json
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.settings import Setting, Settings
from dualpath.launch.fabric_settings import Fabric, FabricLanes
from dualpath.plan.traffic_class import KvPorts, Ratio, parse_ports, parse_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualpath.launch.fabric_settings import SettingsGroup

_WIDTH = 100


class QosSettings(Settings, frozen=True):
    """The compute network and the bandwidth ratio; ``FabricLanes`` defines the lanes."""

    fabric: Annotated[Fabric, Setting("the compute network")]
    ratio: Ratio = "99:1"
    kv_ports: KvPorts = "20480-24575"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath qos`."""
    parser = subparsers.add_parser(
        "qos",
        help="print the settings that keep KV from delaying model communication",
        description="Prints the settings of the paper's §A.1 for a compute network, each with its "
        "reason: inference traffic gets a lane with nearly all of the bandwidth reserved, KV a "
        "lane with the rest, and each may use bandwidth that the other leaves. Nothing is changed; "
        "lines that begin with # are comments.",
        allow_abbrev=False,
    )
    add_json_argument(parser)
    add_settings(parser, QosSettings)
    add_settings(parser, FabricLanes)


def run(args: argparse.Namespace) -> int:
    """Print the settings; return 0.

    Raises:
        ConfigError: a ratio, level, value or range that the network does not support.
    """
    from dualpath.launch.fabric_settings import fabric_settings

    asked = flag_settings(args, QosSettings)
    lanes = flag_settings(
        args, FabricLanes, weights=parse_weights(asked.ratio), kv_ports=parse_ports(asked.kv_ports)
    )
    fabric = asked.fabric
    groups = fabric_settings(fabric, lanes)
    if wrote_json(args, {"fabric": fabric, "lanes": lanes, "groups": groups}):
        return 0
    print(f"# Traffic isolation on {fabric.value}, inference : KV = {lanes.weights.text}")
    for line in _lines(groups):
        print(line)
    return 0


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
