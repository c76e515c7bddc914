"""Arguments that make up a lab, shared by the commands that make one."""

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dualpath.laboratory.lab.settings import LabSettings

#: Options of a lab: argument, key of the settings, factor from the argument's unit to the key's.
_RATES = (
    ("cnic_gbit_per_s", "cnic_bytes_per_s", 1e9 / 8),
    ("loopback_gbit_per_s", "loopback_bytes_per_s", 1e9 / 8),
    ("snic_mb_per_s", "snic_bytes_per_s", 1e6),
)
_PLAIN = ("ratio", "kv_ports", "storage", "storage_server", "shaping")


def add_lab_arguments(parser: argparse.ArgumentParser, *, named: bool = True) -> None:
    """Add the settings of a lab; ``named`` with its name and nodes."""
    made = parser.add_argument_group("lab; overrides --config")
    made.add_argument("--config", metavar="FILE.toml", help="settings of the lab")
    if named:
        made.add_argument("--name", metavar="NAME", help="tells labs apart; without it: lab")
        made.add_argument(
            "--nodes", metavar="xPyD", help="prefill and decode nodes; without it: 1P1D"
        )
    made.add_argument("--cnic-gbit-per-s", type=float, metavar="N", help="of a node, either way")
    made.add_argument("--loopback-gbit-per-s", type=float, metavar="N", help="of a node to itself")
    made.add_argument("--snic-mb-per-s", type=float, metavar="N", help="storage reads of a node")
    made.add_argument("--ratio", metavar="INFERENCE:KV", help="of the lanes; without it: 99:1")
    made.add_argument("--kv-ports", metavar="A-B", help="TCP ports of the KV lane")
    made.add_argument(
        "--storage", metavar="DIR", help="on a disk; without it a file system in memory"
    )
    made.add_argument(
        "--storage-server",
        choices=("none", "s3"),
        help="s3: an S3 server that each node reaches over a shaped link; without it: none",
    )
    made.add_argument("--image-mb", type=int, metavar="N", help="size of that file system")
    made.add_argument(
        "--shaping",
        choices=("auto", "root", "user-namespaces", "token-buckets"),
        help="who shapes the links; auto is the first of the others that is allowed",
    )


def lab_settings(args: argparse.Namespace, **defaults: object) -> "LabSettings":
    """Return the settings of a lab as asked for; ``defaults`` are weaker than any of them.

    Raises ``ConfigError``.
    """
    from dualpath.laboratory.lab.settings import load_settings, parse_shape

    changes: dict[str, Any] = {key: getattr(args, key) for key in _PLAIN}
    changes |= {
        key: None if getattr(args, option) is None else getattr(args, option) * factor
        for option, key, factor in _RATES
    }
    if "nodes" in args:
        changes["name"] = args.name
        if args.nodes is not None:
            changes["prefill"], changes["decode"] = parse_shape(args.nodes)
    if args.image_mb is not None:
        changes["image_bytes"] = args.image_mb * 10**6
    changes = {key: value for key, value in changes.items() if value is not None}
    return load_settings(args.config or "", changes, defaults)


def bench_lab(args: argparse.Namespace) -> "LabSettings":
    """Return the settings of a lab for experiments, whose links a small machine can keep full.

    Raises ``ConfigError``.
    """
    from dualpath.laboratory.experiments.jct import BENCH_LAB

    names = ("name", "snic_bytes_per_s", "cnic_bytes_per_s", "image_bytes")
    return lab_settings(args, **{name: getattr(BENCH_LAB, name) for name in names})
