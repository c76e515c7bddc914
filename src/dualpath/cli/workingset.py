"""`dualpath workingset`: KV-cache that agents in flight keep alive (paper §8.2)."""

import argparse
import math
from typing import TYPE_CHECKING, NamedTuple

from dualpath.cli.output import FORMATS, JSON, TEXT, gigabytes, print_json
from dualpath.report.model import Block, Notes, Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualpath.model.catalog.geometry import ModelGeometry

#: Table 2, 64K: mean tokens of a trajectory.
PAPER_TOTAL_TOKENS = 55_958.0
PAPER_MODEL = "ds-v3.2"


class Quoted(NamedTuple):
    """A working set that §8.2 quotes for DS 660B under DualPath."""

    agents_per_s: float
    working_set_bytes: float


PAPER = (Quoted(0.1, 69e9), Quoted(0.45, 681e9))


def working_set_bytes(
    agents_per_s: float, jct_s: float, total_tokens: float, kv_bytes_per_token: float
) -> float:
    """Return λ·T̄·total/2 tokens as bytes: agents in flight, on average half way through (§8.2)."""
    return agents_per_s * jct_s * total_tokens / 2 * kv_bytes_per_token


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath workingset`."""
    parser = subparsers.add_parser(
        "workingset",
        help="print the KV-cache that agents in flight keep alive",
        description="The working set of §8.2: agents per second x mean job completion time x half "
        "of an agent's tokens x KV bytes per token. Without --aps and --jct it prints what the "
        "paper's own figures imply.",
    )
    parser.add_argument("--aps", type=float, metavar="RATE", help="agents that arrive per second")
    parser.add_argument("--jct", type=float, metavar="S", help="mean job completion time in s")
    parser.add_argument(
        "--total-tokens",
        type=float,
        default=PAPER_TOTAL_TOKENS,
        metavar="N",
        help="mean tokens of an agent when it is done (default: Table 2, 64K)",
    )
    parser.add_argument(
        "--model", default=PAPER_MODEL, metavar="NAME_OR_FILE", help="of the catalog, or a file"
    )
    parser.add_argument(
        "--gap-factor",
        type=float,
        default=1.0,
        metavar="R",
        help="tool calls and pauses make the JCT R times as long",
    )
    parser.add_argument("--format", choices=FORMATS, default=TEXT, help="what to print")


def run(args: argparse.Namespace) -> int:
    """Print the working set; return 0.

    Raises:
        ConfigError: a number out of range, only one of --aps and --jct, an unknown model.
    """
    from dualpath.core.errors import ConfigError
    from dualpath.model.catalog.load import load_model
    from dualpath.report.text import print_blocks

    if (args.aps is None) != (args.jct is None):
        given, missing = ("--aps", "--jct") if args.jct is None else ("--jct", "--aps")
        raise ConfigError(f"{given} is given without {missing}; give both or neither")
    _require("--total-tokens", args.total_tokens, 1.0)
    _require("--gap-factor", args.gap_factor, 1.0)
    if args.aps is not None:
        _require("--aps", args.aps, 0.0)
        _require("--jct", args.jct, 0.0)
    model = load_model(args.model)
    paper_bytes = load_model(PAPER_MODEL).kv_bytes_per_token
    if args.format == JSON:
        _print_json(args, model.kv_bytes_per_token, paper_bytes)
        return 0
    own = () if args.aps is None else _own(args, model)
    print_blocks(*own, *_paper(paper_bytes))
    return 0


def _own(args: argparse.Namespace, model: "ModelGeometry") -> "Sequence[Block]":
    rows = []
    for name, agents_per_s, jct_s in _cases(args):
        size = working_set_bytes(agents_per_s, jct_s, args.total_tokens, model.kv_bytes_per_token)
        rows.append(
            (
                name,
                f"{agents_per_s:g}",
                f"{jct_s:,.0f}",
                f"{agents_per_s * jct_s:,.0f}",
                gigabytes(size),
            )
        )
    title = f"{model.title}, {model.kv_bytes_per_token:,.0f} KV bytes per token"
    columns = ("case", "agents/s", "mean JCT (s)", "agents in flight", "KV (GB)")
    table = Table(title, columns, tuple(rows))
    if args.gap_factor <= 1:
        return (table,)
    gaps = (
        f"Gaps load no engine: with a JCT {args.gap_factor:g} times as long the same machines take "
        f"{args.gap_factor:g} times the agents per second, and the working set grows "
        f"{args.gap_factor**2:g}-fold."
    )
    return table, Notes((gaps,))


def _cases(args: argparse.Namespace) -> list[tuple[str, float, float]]:
    cases = [("as given", args.aps, args.jct)]
    if args.gap_factor > 1:
        factor = args.gap_factor
        cases.append((f"gaps x{factor:g}, same arrivals", args.aps, args.jct * factor))
        cases.append((f"gaps x{factor:g}, at capacity", args.aps * factor, args.jct * factor))
    return cases


def _paper(kv_bytes_per_token: float) -> "Sequence[Block]":
    rows = tuple(
        (
            f"{quoted.agents_per_s:g}",
            gigabytes(quoted.working_set_bytes),
            f"{_implied_jct_s(quoted, kv_bytes_per_token):,.0f}",
        )
        for quoted in PAPER
    )
    title = "The paper's figures (§8.2: DS 660B, DualPath) and the mean JCT they imply"
    note = (
        f"With {PAPER_TOTAL_TOKENS:,.0f} tokens per agent (Table 2, 64K) and "
        f"{kv_bytes_per_token:,.0f} KV bytes per token; the JCT itself is in Fig. 11."
    )
    return Table(title, ("agents/s", "KV (GB)", "mean JCT (s)"), rows), Notes((note,))


def _implied_jct_s(quoted: Quoted, kv_bytes_per_token: float) -> float:
    per_second = working_set_bytes(quoted.agents_per_s, 1.0, PAPER_TOTAL_TOKENS, kv_bytes_per_token)
    return quoted.working_set_bytes / per_second


def _print_json(
    args: argparse.Namespace, kv_bytes_per_token: float, paper_bytes_per_token: float
) -> None:

    cases = [] if args.aps is None else _cases(args)
    result = {
        "model": args.model,
        "kv_bytes_per_token": kv_bytes_per_token,
        "total_tokens": args.total_tokens,
        "cases": [
            {
                "case": name,
                "agents_per_s": agents_per_s,
                "jct_s": jct_s,
                "working_set_bytes": working_set_bytes(
                    agents_per_s, jct_s, args.total_tokens, kv_bytes_per_token
                ),
            }
            for name, agents_per_s, jct_s in cases
        ],
        "paper": [
            {**quoted._asdict(), "implied_jct_s": _implied_jct_s(quoted, paper_bytes_per_token)}
            for quoted in PAPER
        ],
    }
    print_json(result)


def _require(name: str, value: float, least: float) -> None:
    from dualpath.core.errors import ConfigError

    most = 1e12
    if not math.isfinite(value) or not least <= value <= most or value == 0:
        lower = "above 0" if least == 0 else f"at least {least:g}"
        raise ConfigError(f"{name} is {value:g}, must be {lower} and at most {most:g}; correct it")
