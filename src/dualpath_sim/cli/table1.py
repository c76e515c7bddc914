"""`dualpath table1`: the cache-compute ratios of the paper's Table 1, from geometry."""

import argparse
from typing import TYPE_CHECKING, Annotated, Any

from dualpath.cli.output import add_json_argument, percent, wrote_json
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.settings import Setting, Settings
from dualpath.report.model import NOTHING, Notes, Table
from dualpath_sim.cli.model_options import MODEL_METAVAR, KvDtype

if TYPE_CHECKING:
    from dualpath_sim.catalog.table1 import Table1Row

_COLUMNS = ("model", "N (B)", "KV (bytes/token)", "context", "GB/PFLOP", "paper", "error")

_REMARKS = """\
N: active parameters without the embedding. KV: KV-cache that grows with the context.
DeepSeek has two sets of rows. Geometry gives 278,528 FLOP per pair of tokens and layer (absorbed
latent attention, 128 heads). The paper's figures match {pair_flop:,}, which the paper does not
explain; that number is used only here. N excludes the projections of the sparse indexer, as in the
paper's figures."""


class Table1Settings(Settings, frozen=True):
    """Models added to the paper's table."""

    model: Annotated[
        tuple[str, ...],
        Setting(
            "more models: names in the catalog, folders with a config.json, files",
            metavar=f"{MODEL_METAVAR},…",
        ),
    ] = ()
    kv_cache_dtype: KvDtype = "auto"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath table1`."""
    parser = subparsers.add_parser(
        "table1",
        help="print the paper's Table 1 from model geometry, beside the paper's figures",
        description="GB of KV-cache to load per PFLOP to compute, for 429 new tokens behind 16K "
        "and 64K stored ones, computed from the dimensions of each model, beside the paper's "
        "figures.",
    )
    add_json_argument(parser)
    add_settings(parser, Table1Settings)


def run(args: argparse.Namespace) -> int:
    """Print the table; return 0.

    Raises:
        ConfigError: a model that does not exist or cannot be read.
    """
    from dualpath.report.text import print_blocks
    from dualpath_sim.catalog.load import load_model
    from dualpath_sim.catalog.table1 import paper_table1, table1_rows

    asked = flag_settings(args, Table1Settings)
    rows = table1_rows(tuple(load_model(name, asked.kv_cache_dtype) for name in asked.model))
    paper = paper_table1()
    if wrote_json(args, _document(rows, paper.append_tokens)):
        return 0
    title = f"Cache-compute ratio with {paper.append_tokens} new tokens (paper §3, Table 1)"
    table = Table(title, _COLUMNS, tuple(cells for row in rows for cells in _cells(row)))
    remarks = Notes((_REMARKS.format(pair_flop=paper.matching_latent_pair_flop),))
    print_blocks(table, remarks)
    return 0


def _cells(row: "Table1Row") -> list[tuple[str, ...]]:
    title = row.title
    if row.latent_pair_flop is not None:
        title = f"  with {row.latent_pair_flop:,} FLOP per pair"
    lines: list[tuple[str, ...]] = []
    for index, context in enumerate(row.contexts_tokens):
        first = index == 0
        lines.append(
            (
                title if first else "",
                f"{row.active_parameters / 1e9:.2f}" if first else "",
                f"{row.kv_bytes_per_token:,.0f}" if first else "",
                f"{context:,}",
                f"{row.computed[index]:.4g}",
                f"{row.paper[index]:g}" if row.paper else NOTHING,
                percent(row.error[index]) if row.error else NOTHING,
            )
        )
    return lines


def _document(rows: "tuple[Table1Row, ...]", append_tokens: int) -> dict[str, Any]:
    import msgspec

    return {
        "append_tokens": append_tokens,
        "unit": "GB/PFLOP",
        "rows": [{**msgspec.to_builtins(row), "error": row.error} for row in rows],
    }
