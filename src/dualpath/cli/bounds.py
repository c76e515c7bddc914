"""`dualpath bounds`: Eq. 1-9 of §4.2 for a cluster of one's own, and what binds."""

import argparse
import math
import re
from typing import TYPE_CHECKING

from dualpath.cli.output import FORMATS, JSON, TEXT, gigabytes, percent, print_json
from dualpath.report.model import NOTHING, Block, Notes, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualpath.core.cluster import ClusterShape
    from dualpath.model.catalog.geometry import ModelGeometry
    from dualpath.plan.bounds import RatioBound
    from dualpath.plan.movements import Link

_GB = 1e9
#: A load that equals its limit but for rounding fits.
_TOLERANCE = 1e-9
#: The mean prompt of the 64K dataset (§3, Table 2).
_PROMPT_TOKENS = 33_150
_HIT_RATE = 0.987

_REMARKS = """\
Eq. 1 holds for 2s ≤ g; the paper's "s ≤ g" is not enough.
DRAM is half duplex, its reads and writes add up; a NIC carries both directions at full rate.
Eq. 1-9 leave out the KV of miss tokens and the writes to storage; --model counts them, but for
the writes of generated tokens."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath bounds`."""
    parser = subparsers.add_parser(
        "bounds",
        help="print Eq. 1-9 for a cluster, the bottleneck-free P/D range and what binds",
        description="Checks whether all storage NICs of a cluster can be saturated without a "
        "bottleneck in its compute NICs or DRAM (paper §4.2), equation by equation. Options "
        "override what --cluster says; without both, the paper's machine is meant.",
    )
    parser.add_argument("--cluster", metavar="NAME_OR_FILE", help="of the catalog, or a TOML file")
    parser.add_argument(
        "--nodes", metavar="xPyD", help="prefill and decode nodes, for instance 2P4D"
    )
    parser.add_argument("--gpus-per-node", type=int, metavar="N", help="each with one compute NIC")
    parser.add_argument("--cnic-gb-per-s", type=float, metavar="GB/S", help="of one GPU's NIC")
    parser.add_argument("--snic-gb-per-s", type=float, metavar="GB/S", help="of a node's NIC")
    parser.add_argument("--dram-gb-per-s", type=float, metavar="GB/S", help="of a node")
    parser.add_argument(
        "--model",
        metavar="NAME_OR_FILE",
        help="also count miss tokens and writes, from the transfer plans of this model",
    )
    parser.add_argument(
        "--hit-rate", type=float, default=_HIT_RATE, help="stored share of a prompt"
    )
    parser.add_argument(
        "--prompt-tokens", type=int, default=_PROMPT_TOKENS, metavar="N", help="of a prompt"
    )
    parser.add_argument("--format", choices=FORMATS, default=TEXT, help="what to print")


def run(args: argparse.Namespace) -> int:
    """Print the bounds; return 0.

    Raises:
        ConfigError: a cluster, model or number that cannot be.
    """
    from dualpath.model.catalog.load import load_model
    from dualpath.report.text import print_blocks

    shape = _shape(args)
    model = load_model(args.model) if args.model else None
    loads = _plan_loads(args, shape, model) if model else {}
    if args.format == JSON:
        _print_json(shape, loads)
        return 0
    head = (
        f"{shape.prefill_nodes}P{shape.decode_nodes}D, g = {shape.gpus_per_node}, "
        f"B = {gigabytes(shape.cnic_bytes_per_s)} GB/s, s = {shape.snic_ratio:.3g} "
        f"(SNIC {gigabytes(shape.snic_ratio * shape.cnic_bytes_per_s)} GB/s), "
        f"M = {gigabytes(shape.dram_bytes_per_s)} GB/s, "
        f"P/D = {_ratio(shape):.3g}"
    )
    blocks: list[Block] = [Notes((head,)), *_equations(shape), Notes(tuple(_verdict(shape)))]
    if model:
        blocks += _plan_blocks(args, shape, model, loads)
    blocks.append(Notes((_REMARKS,)))
    print_blocks(*blocks)
    return 0


def _shape(args: argparse.Namespace) -> "ClusterShape":
    from dualpath.core.cluster import ClusterShape
    from dualpath.model.catalog.load import load_cluster
    from dualpath.model.sim.settings import ClusterSettings

    # The defaults are §4.2's nominal rates, the paper's cluster files hold fitted ones.
    nominal = ClusterSettings(prefill_nodes=2, decode_nodes=4)
    cluster = load_cluster(args.cluster) if args.cluster else nominal
    nodes = (cluster.prefill_nodes, cluster.decode_nodes)
    prefill_nodes, decode_nodes = _nodes(args.nodes) if args.nodes else nodes
    gpus = cluster.gpus_per_node if args.gpus_per_node is None else args.gpus_per_node
    _require("--gpus-per-node", gpus, 1, 1024)
    rates = {}
    for option, given, default in (
        ("--cnic-gb-per-s", args.cnic_gb_per_s, cluster.cnic_bytes_per_s),
        ("--snic-gb-per-s", args.snic_gb_per_s, cluster.snic_bytes_per_s),
        ("--dram-gb-per-s", args.dram_gb_per_s, cluster.dram_bytes_per_s),
    ):
        rates[option] = default if given is None else given * _GB
        _require(option, rates[option] / _GB, 1e-6, 1e6)
    return ClusterShape(
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
        gpus_per_node=gpus,
        cnic_bytes_per_s=rates["--cnic-gb-per-s"],
        snic_ratio=rates["--snic-gb-per-s"] / rates["--cnic-gb-per-s"],
        dram_bytes_per_s=rates["--dram-gb-per-s"],
    )


def _nodes(text: str) -> tuple[int, int]:
    from dualpath.core.errors import ConfigError

    match = re.fullmatch(r"(\d{1,6})[Pp](\d{1,6})[Dd]", text)
    if not match or "0" in (match[1].lstrip("0") or "0", match[2].lstrip("0") or "0"):
        raise ConfigError(f"--nodes is {text!r}, must be numbers from 1 on like 2P4D; correct it")
    return int(match[1]), int(match[2])


def _require(name: str, value: float, least: float, most: float) -> None:
    from dualpath.core.errors import ConfigError

    if not math.isfinite(value) or not least <= value <= most:
        raise ConfigError(
            f"{name} is {value:g}, must be between {least:g} and {most:g}; correct it"
        )


def _equations(shape: "ClusterShape") -> tuple[Table, Table]:
    from dualpath.plan.bounds import link_bounds, prefill_to_decode_range, ratio_bounds

    rows = tuple(
        (
            bound.equation,
            bound.formula,
            _name(bound.link),
            gigabytes(bound.load_bytes_per_s),
            gigabytes(bound.limit_bytes_per_s),
            percent(bound.margin, 0),
        )
        for bound in link_bounds(shape)
    )
    ratio = _ratio(shape)
    least, most = prefill_to_decode_range(shape)
    ranges = [
        (
            bound.equation,
            bound.formula,
            _name(bound.link),
            f"{bound.ratio:.3g}",
            "holds" if _holds(bound, ratio) else "EXCEEDED",
        )
        for bound in ratio_bounds(shape)
    ]
    whole = f"{least:.3g} to {most:.3g}" if least <= most else "none"
    inside = all(_holds(bound, ratio) for bound in ratio_bounds(shape)) and least <= most
    verdict = "holds" if inside else "EXCEEDED"
    ranges.append(("Eq. 9", "all of them, and Eq. 1", "", whole, verdict))
    columns = ("", "at P/D", "link", "left (GB/s)", "right (GB/s)", "margin")
    solved = ("", "solved for P/D", "link", "P/D", "here")
    return Table("", columns, rows), Table("", solved, tuple(ranges), align="lllrl")


def _verdict(shape: "ClusterShape") -> list[str]:
    """Return what binds here, and what would bind first as P/D moves."""
    from dualpath.plan.bounds import link_bounds, prefill_to_decode_range

    bounds = link_bounds(shape)
    tightest = min(bounds, key=lambda bound: bound.margin)
    exceeded = [bound for bound in bounds if bound.margin < -_TOLERANCE]
    name = f"{_name(tightest.link)} ({tightest.equation})"
    if exceeded:
        lines = [
            f"Binds: {name}. It lets the storage NICs be used to "
            f"{100 / (1 - tightest.margin):.0f} % of their bandwidth."
        ]
    else:
        lines = [
            f"Nothing binds: all storage NICs can be saturated. Nearest to its limit is {name}, "
            f"loaded to {100 * (1 - tightest.margin):.0f} %."
        ]
    lines += [_hopeless(bound.link, shape) for bound in exceeded if bound.link in _FIXED]
    least, most = prefill_to_decode_range(shape)
    if least <= most:
        lines += _as_ratio_moves(shape)
    elif not any(bound.link in _FIXED for bound in exceeded):
        lines.append("No P/D satisfies Eq. 9: lower the SNIC rate or add compute NIC bandwidth.")
    return lines


#: Links whose load does not depend on P/D.
_FIXED = ("pe-cnic-read", "pe-dram")


def _hopeless(link: "Link", shape: "ClusterShape") -> str:
    if link.value == "pe-cnic-read":
        rate = shape.gpus_per_node / 2 * shape.cnic_bytes_per_s
        what = f"an SNIC of at most g/2 · B = {gigabytes(rate)} GB/s"
    else:
        what = f"an SNIC of at most M/2 = {gigabytes(shape.dram_bytes_per_s / 2)} GB/s"
    return f"The load of {_name(link)} does not depend on P/D; it needs {what}."


def _as_ratio_moves(shape: "ClusterShape") -> list[str]:
    from dualpath.plan.bounds import prefill_to_decode_range, ratio_bounds

    least, most = prefill_to_decode_range(shape)
    bounds = ratio_bounds(shape)
    below = next(bound for bound in bounds if bound.least)
    above = [b for b in bounds if not b.least and math.isclose(b.ratio, most, rel_tol=_TOLERANCE)]
    names = " and ".join(f"{_name(bound.link)} ({bound.equation})" for bound in above)
    verb = "binds" if len(above) == 1 else "bind"
    lines = [
        f"As P/D grows {names} {verb} first, at {most:.3g}; as it falls {_name(below.link)} "
        f"({below.equation}) does, at {least:.3g}."
    ]
    nodes = shape.prefill_nodes + shape.decode_nodes
    fits = [
        p
        for p in range(1, nodes)
        if least * (1 - _TOLERANCE) <= p / (nodes - p) <= most * (1 + _TOLERANCE)
    ]
    if fits:
        span = f"{fits[0]}P{nodes - fits[0]}D"
        if len(fits) > 1:
            span += f" to {fits[-1]}P{nodes - fits[-1]}D"
        lines.append(f"Bottleneck-free splits of {nodes} nodes: {span}.")
    else:
        lines.append(f"No split of {nodes} nodes lies in the range.")
    return lines


def _plan_loads(
    args: argparse.Namespace, shape: "ClusterShape", model: "ModelGeometry"
) -> "dict[Link, float]":
    from dualpath.core.blocks import BlockGeometry
    from dualpath.core.errors import ConfigError
    from dualpath.plan.bounds import plan_bytes_per_s

    _require("--prompt-tokens", args.prompt_tokens, 2, 1 << 24)
    _require("--hit-rate", args.hit_rate, 0, 1)
    hits = round(args.hit_rate * args.prompt_tokens)
    if not 1 <= hits < args.prompt_tokens:
        raise ConfigError(
            f"--hit-rate {args.hit_rate:g} makes {hits} of {args.prompt_tokens} prompt tokens "
            f"stored, must be 1 to {args.prompt_tokens - 1}; change it or --prompt-tokens"
        )
    # Blocks of one token, so that no rounding to blocks enters.
    per_layer = max(round(model.kv_bytes_per_token_and_layer), 1)
    geometry = BlockGeometry(layers=model.layers, block_tokens=1, layer_block_bytes=per_layer)
    return plan_bytes_per_s(shape, geometry, hits, args.prompt_tokens - hits)


def _plan_blocks(
    args: argparse.Namespace,
    shape: "ClusterShape",
    model: "ModelGeometry",
    loads: "dict[Link, float]",
) -> "Sequence[Block]":
    from dualpath.plan.bounds import closed_form_bytes_per_s, limit_bytes_per_s

    closed = closed_form_bytes_per_s(shape)
    title = (
        f"From the transfer plans of {model.title}: {args.prompt_tokens:,} prompt tokens, "
        f"{args.hit_rate * 100:.4g} % hits, misses and writes counted"
    )
    rows = []
    for link, load in loads.items():
        extra = gigabytes(round(load - closed[link], -3)) if link in closed else NOTHING
        limit = limit_bytes_per_s(shape, link)
        rows.append(
            (_name(link), gigabytes(load), extra, gigabytes(limit), percent(1 - load / limit))
        )
    columns = ("link", "load (GB/s)", "not in Eq. 1-9", "limit (GB/s)", "margin")
    table = Table(title, columns, tuple(rows))
    over = [
        link
        for link, load in loads.items()
        if load > limit_bytes_per_s(shape, link) * (1 + _TOLERANCE)
    ]
    if not over:
        return (table,)
    return table, Notes((f"Over the limit with misses counted: {', '.join(map(_name, over))}.",))


def _print_json(shape: "ClusterShape", loads: "dict[Link, float]") -> None:
    import msgspec

    from dualpath.plan.bounds import link_bounds, prefill_to_decode_range, ratio_bounds

    least, most = prefill_to_decode_range(shape)
    result = {
        "shape": shape,
        "link_bounds": [
            {**msgspec.to_builtins(bound), "margin": bound.margin} for bound in link_bounds(shape)
        ],
        "ratio_bounds": ratio_bounds(shape),
        "bottleneck_free_range": [least, most] if least <= most else None,
        "verdict": _verdict(shape),
        "plan_bytes_per_s": {link.value: load for link, load in loads.items()},
    }
    print_json(result)


def _holds(bound: "RatioBound", ratio: float) -> bool:
    if math.isclose(ratio, bound.ratio, rel_tol=_TOLERANCE):
        return True
    return ratio > bound.ratio if bound.least else ratio < bound.ratio


def _ratio(shape: "ClusterShape") -> float:
    return shape.prefill_nodes / shape.decode_nodes


def _name(link: "Link") -> str:
    """Return `PE CNIC read` for `pe-cnic-read`."""
    first, *rest = link.value.split("-")
    return " ".join([first.upper(), *(w.upper() if w in _DEVICES else w for w in rest)])


_DEVICES = ("cnic", "snic", "dram")
