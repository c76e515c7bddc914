"""Tables of a model's size and requirements: Table 1's row, HBM, buffers, links."""

from typing import TYPE_CHECKING

from dualpath.cli.output import gigabytes, percent
from dualpath.report.model import NOTHING, Block, Notes, Table

if TYPE_CHECKING:
    from dualpath.core.cluster import ClusterShape
    from dualpath.plan.movements import Link
    from dualpath_sim.catalog.geometry import ModelGeometry
    from dualpath_sim.evaluation.needs import RoleNeeds

_DEVICES = ("cnic", "snic", "dram")


def link_name(link: "Link") -> str:
    """Return `PE CNIC read` for `pe-cnic-read`."""
    first, *rest = link.value.split("-")
    return " ".join([first.upper(), *(w.upper() if w in _DEVICES else w for w in rest)])


def model_table(model: "ModelGeometry") -> Table:
    """Return the model's row of Table 1."""
    from dualpath_sim.catalog.table1 import paper_table1

    paper = paper_table1()
    ratios = [
        f"{model.cache_compute_ratio(context, paper.append_tokens):.4g}"
        for context in paper.contexts_tokens
    ]
    columns = (
        *("model", "parameters (B)", "N (B)", "KV (bytes/token)", "of it in windows and states"),
        *(f"GB/PFLOP at {context // 1024}K" for context in paper.contexts_tokens),
        "MTP layers",
    )
    windows = model.kv_bytes_per_token_all_layers - model.kv_bytes_per_token
    row = (
        model.title,
        f"{model.total_parameters / 1e9:,.1f}",
        f"{model.active_parameters / 1e9:.2f}",
        f"{model.kv_bytes_per_token_all_layers:,.0f}",
        f"{windows:,.0f}" if windows else NOTHING,
        *ratios,
        f"{model.draft_layers}" if model.draft_layers else NOTHING,
    )
    return Table("", columns, (row,))


def kv_table(model: "ModelGeometry") -> Table:
    """Return what the layers of each kind store, per token or per sequence."""
    rows = tuple(
        (
            kind.kind,
            f"{kind.layers}",
            f"{kind.token_bytes:,.0f}",
            f"{kind.window_tokens:,}" if kind.window_tokens else "all",
            f"{kind.sequence_bytes / 1e6:,.1f}" if kind.sequence_bytes else NOTHING,
        )
        for kind in model.kv_by_kind()
    )
    columns = ("layers with", "number", "stored (bytes/token)", "of a hit moves (tokens)")
    return Table(f"KV of {model.title}", (*columns, "per sequence (MB)"), rows)


def needs_blocks(needs: "tuple[RoleNeeds, ...]", name: str) -> tuple[Block, ...]:
    """Return HBM, buffer and link needs of each role in a shape, and notes on needs not met."""
    columns = (
        *("role", "GPUs per engine", "engines per group", "GPUs share experts", "hold the same KV"),
        *("weights (GB)", "left for KV (GB)", "set (GB)", "KV tokens per engine", "buffer (GB)"),
        *("longest prompts in a node's", "CNIC out (MB/prompt)", "CNIC in"),
    )
    rows = tuple(
        (
            needed.role.value,
            f"{needed.gpus_per_engine}",
            f"{needed.group_engines}",
            f"{needed.expert_gpus}" if needed.expert_gpus else NOTHING,
            f"{needed.replicas:g}",
            gigabytes(needed.weight_bytes),
            gigabytes(needed.left_hbm_bytes),
            gigabytes(needed.set_hbm_bytes),
            f"{needed.hbm_tokens:,}",
            gigabytes(needed.buffer_bytes),
            NOTHING if needed.buffer_prompts is None else f"{needed.buffer_prompts:.1f}",
            f"{needed.cnic_read_bytes / 1e6:,.1f}",
            f"{needed.cnic_write_bytes / 1e6:,.1f}",
        )
        for needed in needs
    )
    # Transposed: a row per quantity instead of thirteen columns.
    turned = tuple(zip(columns, *rows, strict=True))
    table = Table(f"One GPU of {name}", turned[0], turned[1:])
    tight = [
        f"Weights and reserves leave {gigabytes(needed.left_hbm_bytes)} GB of a {needed.role} GPU, "
        f"but {gigabytes(needed.set_hbm_bytes)} GB are set: give --hbm-from-weights, or more GPUs "
        "per engine."
        for needed in needs
        if needed.set_hbm_bytes > needed.left_hbm_bytes
    ]
    return (table, Notes(tuple(tight))) if tight else (table,)


def link_table(
    title: str, shape: "ClusterShape", loads: "dict[Link, float]", tolerance: float
) -> tuple[Block, ...]:
    """Return the load of every link with saturated storage NICs, and the links over their limit."""
    from dualpath.plan.bounds import closed_form_bytes_per_s, limit_bytes_per_s

    closed, rows, over = closed_form_bytes_per_s(shape), [], []
    for link, load in loads.items():
        extra = gigabytes(round(load - closed[link], -3)) if link in closed else NOTHING
        limit = limit_bytes_per_s(shape, link)
        margin = percent(1 - load / limit)
        rows.append((link_name(link), gigabytes(load), extra, gigabytes(limit), margin))
        if load > limit * (1 + tolerance):
            over.append(link_name(link))
    columns = ("link", "load (GB/s)", "not in Eq. 1-9", "limit (GB/s)", "margin")
    table = Table(title, columns, tuple(rows))
    if not over:
        return (table,)
    return table, Notes((f"Over the limit with misses counted: {', '.join(over)}.",))
