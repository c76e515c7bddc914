"""Table 1 of the paper, computed from the catalog's geometry beside the paper's figures."""

from importlib import resources

import msgspec

from dualpath_sim.catalog.geometry import LatentAttention, ModelGeometry
from dualpath_sim.catalog.load import load_model, parse


class Table1Row(msgspec.Struct, frozen=True, kw_only=True):
    """Cache-compute ratios of one model in GB/PFLOP, one per context.

    ``paper`` is None for a model that Table 1 does not have; ``error`` is computed/paper - 1.
    ``latent_pair_flop`` is None where geometry gives the cost of attention.
    """

    model: str
    title: str
    kv_bytes_per_token: float
    active_parameters: int
    contexts_tokens: tuple[int, ...]
    computed: tuple[float, ...]
    paper: tuple[float, ...] | None
    latent_pair_flop: int | None

    @property
    def error(self) -> tuple[float, ...] | None:
        """Relative error per context."""
        if self.paper is None:
            return None
        return tuple(
            mine / theirs - 1 for mine, theirs in zip(self.computed, self.paper, strict=True)
        )


class _PaperRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    paper: tuple[float, ...]


class _Quoted(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    context_tokens: int
    paper: float


class PaperTable1(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the paper prints, and the cost per pair with which latent attention agrees with it."""

    append_tokens: int
    contexts_tokens: tuple[int, ...]
    matching_latent_pair_flop: int
    rows: tuple[_PaperRow, ...]
    quoted: _Quoted


def paper_table1() -> PaperTable1:
    """Return the paper's figures."""
    return parse(resources.files("dualpath_sim.catalog") / "table1.toml", PaperTable1)


def table1_rows(extra: tuple[ModelGeometry, ...] = ()) -> tuple[Table1Row, ...]:
    """Return the paper's models, the ratio quoted in §3, DS 27B and ``extra`` models.

    A model with latent attention that the paper has figures of comes twice: by geometry, and with
    the cost per pair that matches the paper.
    """
    paper = paper_table1()
    rows: list[Table1Row] = []
    for line in paper.rows:
        rows += _rows(load_model(line.model), paper, paper.contexts_tokens, line.paper)
    quoted = paper.quoted
    rows += _rows(load_model(quoted.model), paper, (quoted.context_tokens,), (quoted.paper,))
    for geometry in (load_model("ds-27b"), *extra):
        rows += _rows(geometry, paper, paper.contexts_tokens, None)
    return tuple(rows)


def _rows(
    geometry: ModelGeometry,
    table: PaperTable1,
    contexts_tokens: tuple[int, ...],
    paper: tuple[float, ...] | None,
) -> list[Table1Row]:
    costs: list[int | None] = [None]
    if paper and any(isinstance(part, LatentAttention) for part in geometry.attention):
        costs.append(table.matching_latent_pair_flop)
    return [
        Table1Row(
            model=geometry.name,
            title=geometry.title,
            kv_bytes_per_token=geometry.kv_bytes_per_token,
            active_parameters=geometry.active_parameters,
            contexts_tokens=contexts_tokens,
            computed=tuple(
                geometry.cache_compute_ratio(
                    context, table.append_tokens, latent_pair_flop=pair_flop
                )
                for context in contexts_tokens
            ),
            paper=paper,
            latent_pair_flop=pair_flop,
        )
        for pair_flop in costs
    ]
