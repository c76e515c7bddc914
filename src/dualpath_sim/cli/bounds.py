"""`dualpath bounds`: Eq. 1-9 of §4.2 for a given cluster, and its bottleneck."""

import argparse
import math
from typing import TYPE_CHECKING, Annotated, Any

from dualpath.cli.output import add_json_argument, gigabytes, percent, wrote_json
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.cluster import NodesSettings
from dualpath.core.settings import Setting, Settings
from dualpath.report.model import Block, Notes, Table
from dualpath_sim.cli.model_options import MODEL_METAVAR, KvDtype
from dualpath_sim.cli.model_tables import link_name, link_table
from dualpath_sim.simulator.settings import ClusterSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualpath.core.cluster import ClusterShape
    from dualpath.plan.bounds import RatioBound
    from dualpath.plan.movements import Link
    from dualpath_sim.catalog.geometry import ModelGeometry

#: Relative tolerance of comparisons with a limit, for rounding.
_TOLERANCE = 1e-9
#: The mean prompt of the 64K dataset (§3, Table 2).
_PROMPT_TOKENS = 33_150
_HIT_RATE = 0.987

_REMARKS = """\
Eq. 1 holds for 2s ≤ g (for (1 + r)s ≤ g); the paper's "s ≤ g" is not enough.
DRAM is half duplex: its reads and writes add up; a NIC carries both directions at full rate.
Eq. 1-9 omit the KV of miss tokens and the writes to storage; --model counts them, except the
writes of generated tokens. Without --model every GPU of an engine has its own KV heads."""


class BoundsSettings(Settings, frozen=True, kw_only=True):
    """The cluster, and the prompts; the transfer plans of these are summed."""

    cluster: Annotated[
        str, Setting("cluster from the catalog or a TOML file", metavar="C.toml|NAME")
    ] = ""
    model: Annotated[
        str,
        Setting(
            "also count miss tokens and writes, from the transfer plans of this model",
            metavar=MODEL_METAVAR,
        ),
    ] = ""
    kv_cache_dtype: KvDtype = "auto"
    hit_rate: Annotated[float, Setting("stored share of a prompt", ge=0, le=1)] = _HIT_RATE
    prompt_tokens: Annotated[int, Setting("tokens of a prompt", ge=2, le=1 << 24)] = _PROMPT_TOKENS


#: Settings of a cluster file that Eq. 1-9 use.
_MACHINE = (
    "gpus_per_node",
    "prefill_tp",
    "decode_tp",
    "cnic_bytes_per_s",
    "snic_bytes_per_s",
    "dram_bytes_per_s",
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath bounds`."""
    parser = subparsers.add_parser(
        "bounds",
        help="print Eq. 1-9 for a cluster, the bottleneck-free P/D range and the bottleneck",
        description="Checks whether all storage NICs of a cluster can be saturated without a "
        "bottleneck in its compute NICs or DRAM (paper §4.2), equation by equation. Options "
        "override --cluster; the default is the paper's cluster.",
    )
    add_json_argument(parser)
    add_settings(parser, BoundsSettings)
    unset = dict.fromkeys(("nodes", *_MACHINE))
    add_settings(parser, NodesSettings, defaults=unset)
    add_settings(parser, ClusterSettings, only=_MACHINE, defaults=unset)


def run(args: argparse.Namespace) -> int:
    """Print the bounds; return 0.

    Raises:
        ConfigError: an invalid cluster, model or number.
    """
    from dualpath.report.text import print_blocks
    from dualpath_sim.catalog.load import load_model

    settings = flag_settings(args, BoundsSettings)
    model = load_model(settings.model, settings.kv_cache_dtype) if settings.model else None
    shape = _shape(args, settings, model)
    loads = _plan_loads(settings, shape, model) if model else {}
    if wrote_json(args, _document(shape, loads)):
        return 0
    head = (
        f"{shape.prefill_nodes}P{shape.decode_nodes}D, g = {shape.gpus_per_node}, "
        f"B = {gigabytes(shape.cnic_bytes_per_s)} GB/s, s = {shape.snic_ratio:.3g} "
        f"(SNIC {gigabytes(shape.snic_ratio * shape.cnic_bytes_per_s)} GB/s), "
        f"M = {gigabytes(shape.dram_bytes_per_s)} GB/s, "
        f"P/D = {_ratio(shape):.3g}"
    )
    if (shape.prefill_replicas, shape.decode_replicas) != (1, 1):
        head += (
            f"; the same KV is loaded by r = {shape.prefill_replicas:g} GPUs of a PE and "
            f"q = {shape.decode_replicas:g} of a DE"
        )
    blocks: list[Block] = [Notes((head,)), *_equations(shape), Notes(tuple(_verdict(shape)))]
    if model:
        blocks += _plan_blocks(settings, shape, model, loads)
    blocks.append(Notes((_REMARKS,)))
    print_blocks(*blocks)
    return 0


def _shape(
    args: argparse.Namespace, settings: "BoundsSettings", model: "ModelGeometry | None"
) -> "ClusterShape":
    import msgspec

    from dualpath_sim.catalog.load import load_cluster
    from dualpath_sim.evaluation.needs import replicas_of
    from dualpath_sim.evaluation.planner import link_shape

    # The defaults are §4.2's nominal rates; the paper's cluster files have fitted ones.
    nominal = ClusterSettings(prefill_nodes=2, decode_nodes=4)
    values = msgspec.structs.asdict(load_cluster(settings.cluster) if settings.cluster else nominal)
    if "nodes" in args:
        nodes = flag_settings(args, NodesSettings)
        values |= {"prefill_nodes": nodes.prefill, "decode_nodes": nodes.decode}
    cluster = flag_settings(args, ClusterSettings, defaults=values)
    return link_shape(cluster, replicas_of(cluster, model))


def _equations(shape: "ClusterShape") -> tuple[Table, Table]:
    from dualpath.plan.bounds import link_bounds, prefill_to_decode_range, ratio_bounds

    rows = tuple(
        (
            bound.equation,
            bound.formula,
            link_name(bound.link),
            gigabytes(bound.load_bytes_per_s),
            gigabytes(bound.limit_bytes_per_s),
            percent(bound.margin, 0),
        )
        for bound in link_bounds(shape)
    )
    ratio = _ratio(shape)
    low, high = prefill_to_decode_range(shape)
    ranges = [
        (
            bound.equation,
            bound.formula,
            link_name(bound.link),
            f"{bound.ratio:.3g}",
            "holds" if _holds(bound, ratio) else "EXCEEDED",
        )
        for bound in ratio_bounds(shape)
    ]
    whole = f"{low:.3g} to {high:.3g}" if low <= high else "none"
    inside = all(_holds(bound, ratio) for bound in ratio_bounds(shape)) and low <= high
    verdict = "holds" if inside else "EXCEEDED"
    ranges.append(("Eq. 9", "all of them, and Eq. 1", "", whole, verdict))
    columns = ("", "at P/D", "link", "left (GB/s)", "right (GB/s)", "margin")
    solved = ("", "solved for P/D", "link", "P/D", "here")
    return Table("", columns, rows), Table("", solved, tuple(ranges), align="lllrl")


def _verdict(shape: "ClusterShape") -> list[str]:
    """Return the bottleneck of this shape, and the first ones as P/D changes."""
    from dualpath.plan.bounds import link_bounds, prefill_to_decode_range

    bounds = link_bounds(shape)
    tightest = min(bounds, key=lambda bound: bound.margin)
    exceeded = [bound for bound in bounds if bound.margin < -_TOLERANCE]
    name = f"{link_name(tightest.link)} ({tightest.equation})"
    if exceeded:
        lines = [
            f"Bottleneck: {name}. It limits the storage NICs to "
            f"{100 / (1 - tightest.margin):.0f} % of their bandwidth."
        ]
    else:
        lines = [
            f"No bottleneck: all storage NICs can be saturated. Closest to its limit is {name}, "
            f"loaded to {100 * (1 - tightest.margin):.0f} %."
        ]
    lines += [_infeasible(bound.link, shape) for bound in exceeded if bound.link in _FIXED]
    low, high = prefill_to_decode_range(shape)
    if low <= high:
        lines += _as_ratio_moves(shape)
    elif not any(bound.link in _FIXED for bound in exceeded):
        lines.append("No P/D satisfies Eq. 9: lower the SNIC rate or add compute NIC bandwidth.")
    return lines


#: Links with a load that does not depend on P/D.
_FIXED = ("pe-cnic-read", "pe-dram")


def _infeasible(link: "Link", shape: "ClusterShape") -> str:
    once = 1 + shape.prefill_replicas
    if link.value == "pe-cnic-read":
        rate = shape.gpus_per_node / once * shape.cnic_bytes_per_s
        limit = f"an SNIC of at most g/{once:g} · B = {gigabytes(rate)} GB/s"
    else:
        rate = shape.dram_bytes_per_s / once
        limit = f"an SNIC of at most M/{once:g} = {gigabytes(rate)} GB/s"
    return f"The load of {link_name(link)} does not depend on P/D; it requires {limit}."


def _as_ratio_moves(shape: "ClusterShape") -> list[str]:
    from dualpath.plan.bounds import prefill_to_decode_range, ratio_bounds

    low, high = prefill_to_decode_range(shape)
    bounds = ratio_bounds(shape)
    below = next(bound for bound in bounds if bound.least)
    above = [b for b in bounds if not b.least and math.isclose(b.ratio, high, rel_tol=_TOLERANCE)]
    names = " and ".join(f"{link_name(bound.link)} ({bound.equation})" for bound in above)
    verb = "becomes" if len(above) == 1 else "become"
    lines = [
        f"As P/D grows, {names} {verb} the bottleneck at {high:.3g}; as it falls, "
        f"{link_name(below.link)} ({below.equation}) does at {low:.3g}."
    ]
    nodes = shape.prefill_nodes + shape.decode_nodes
    fits = [
        p
        for p in range(1, nodes)
        if low * (1 - _TOLERANCE) <= p / (nodes - p) <= high * (1 + _TOLERANCE)
    ]
    if fits:
        span = f"{fits[0]}P{nodes - fits[0]}D"
        if len(fits) > 1:
            span += f" to {fits[-1]}P{nodes - fits[-1]}D"
        lines.append(f"Bottleneck-free splits of {nodes} nodes: {span}.")
    else:
        lines.append(f"No split of {nodes} nodes is in the range.")
    return lines


def _plan_loads(
    settings: BoundsSettings, shape: "ClusterShape", model: "ModelGeometry"
) -> "dict[Link, float]":
    from dualpath.core.errors import ConfigError
    from dualpath.plan.bounds import plan_bytes_per_s

    hits = round(settings.hit_rate * settings.prompt_tokens)
    if not 1 <= hits < settings.prompt_tokens:
        raise ConfigError(
            f"--hit-rate {settings.hit_rate:g} means {hits} of {settings.prompt_tokens} prompt "
            f"tokens are stored, must be 1 to {settings.prompt_tokens - 1}; change it or "
            "--prompt-tokens"
        )
    # Blocks of one token, so that nothing is rounded to blocks.
    geometry = model.block_geometry(1)
    return plan_bytes_per_s(shape, geometry, hits, settings.prompt_tokens - hits)


def _plan_blocks(
    settings: BoundsSettings,
    shape: "ClusterShape",
    model: "ModelGeometry",
    loads: "dict[Link, float]",
) -> "Sequence[Block]":
    title = (
        f"From the transfer plans of {model.title}: {settings.prompt_tokens:,} prompt tokens, "
        f"{settings.hit_rate * 100:.4g} % hits, misses and writes counted"
    )
    return link_table(title, shape, loads, _TOLERANCE)


def _document(shape: "ClusterShape", loads: "dict[Link, float]") -> dict[str, Any]:
    import msgspec

    from dualpath.plan.bounds import link_bounds, prefill_to_decode_range, ratio_bounds

    low, high = prefill_to_decode_range(shape)
    return {
        "shape": shape,
        "link_bounds": [
            {**msgspec.to_builtins(bound), "margin": bound.margin} for bound in link_bounds(shape)
        ],
        "ratio_bounds": ratio_bounds(shape),
        "bottleneck_free_range": [low, high] if low <= high else None,
        "verdict": _verdict(shape),
        "plan_bytes_per_s": {link.value: load for link, load in loads.items()},
    }


def _holds(bound: "RatioBound", ratio: float) -> bool:
    if math.isclose(ratio, bound.ratio, rel_tol=_TOLERANCE):
        return True
    return ratio > bound.ratio if bound.least else ratio < bound.ratio


def _ratio(shape: "ClusterShape") -> float:
    return shape.prefill_nodes / shape.decode_nodes
