"""`dualpath workingset`: KV bytes of a prompt, an agent and all concurrent agents (§8.2)."""

import argparse
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from dualpath.cli.output import add_json_argument, gigabytes, wrote_json
from dualpath.cli.settings import add_settings, flag_settings
from dualpath.core.errors import ConfigError
from dualpath.core.settings import Setting, Settings
from dualpath.report.model import Block, Notes, Table
from dualpath_sim.cli.model_options import MODEL_METAVAR, KvDtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dualpath_sim.catalog.geometry import ModelGeometry
    from dualpath_sim.evaluation.needs import ModelSizes

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
    """Return λ·T̄·total/2 tokens as bytes: concurrent agents, on average half complete (§8.2)."""
    return agents_per_s * jct_s * total_tokens / 2 * kv_bytes_per_token


class WorkingSetSettings(Settings, frozen=True, kw_only=True):
    """The load of agents, and their sizes."""

    agents_per_s: Annotated[float | None, Setting("arrival rate of agents", gt=0, le=1e12)] = None
    jct_s: Annotated[float | None, Setting("mean job completion time", gt=0, le=1e12)] = None
    total_tokens: Annotated[
        float, Setting("mean final context of an agent; Table 2, 64K", ge=1, le=1e12)
    ] = PAPER_TOTAL_TOKENS
    model: Annotated[
        tuple[str, ...], Setting("models of the catalog, or files", metavar=f"{MODEL_METAVAR},…")
    ] = (PAPER_MODEL,)
    kv_cache_dtype: KvDtype = "auto"
    gap_factor: Annotated[
        float, Setting("factor by which tool calls and pauses extend the JCT", ge=1, le=1e12)
    ] = 1.0
    prompt_tokens: Annotated[int, Setting("tokens of the longest prompt", ge=2, le=1 << 24)] = (
        1 << 16
    )
    block_tokens: Annotated[int, Setting("tokens of a block", ge=1, le=1 << 16)] = 64
    layer_buffers: Annotated[
        int, Setting("layers of KV in the HBM of a prefill engine", ge=1, le=1 << 10)
    ] = 2
    snic_bytes_per_s: Annotated[float, Setting("rate of a node's storage NIC", ge=1, le=1e15)] = (
        50e9
    )

    def check(self) -> None:
        """Raise ``ConfigError`` if only one of rate and JCT is given."""
        super().check()
        if (self.agents_per_s is None) != (self.jct_s is None):
            names = ("{agents_per_s}", "{jct_s}")
            given, missing = names if self.jct_s is None else names[::-1]
            raise ConfigError(f"{given} is given without {missing}; give both or neither")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the parser of `dualpath workingset`."""
    parser = subparsers.add_parser(
        "workingset",
        help="print the KV bytes of prompts, agents and the working set, per model",
        description="Print the bytes of one prompt and one agent of a model in buffers, HBM, links "
        "and storage, and the working set of §8.2: agents per second x mean job completion time x "
        "half of an agent's tokens x KV bytes per token. Without --agents-per-s and --jct-s, print "
        "the mean JCT that the paper's figures imply.",
    )
    add_json_argument(parser)
    add_settings(parser, WorkingSetSettings)


def run(args: argparse.Namespace) -> int:
    """Print the sizes and the working set; return 0.

    Raises:
        ConfigError: a number out of range, only one of rate and JCT, an unknown model.
    """
    from dualpath.report.text import print_blocks
    from dualpath_sim.catalog.load import load_model

    asked = flag_settings(args, WorkingSetSettings)
    models = [load_model(name, asked.kv_cache_dtype) for name in asked.model]
    paper_bytes = load_model(PAPER_MODEL).kv_bytes_per_token_all_layers
    sizes = [_sizes(asked, model) for model in models]
    if wrote_json(args, _document(asked, models, sizes, paper_bytes)):
        return 0
    own = () if asked.agents_per_s is None else _own(asked, models)
    print_blocks(_size_table(asked, models, sizes), *own, *_paper(paper_bytes))
    return 0


def _sizes(asked: WorkingSetSettings, model: "ModelGeometry") -> "ModelSizes":
    from dualpath_sim.evaluation.needs import model_sizes

    return model_sizes(
        model,
        prompt_tokens=asked.prompt_tokens,
        total_tokens=asked.total_tokens,
        block_tokens=asked.block_tokens,
        layer_buffers=asked.layer_buffers,
    )


def _size_table(
    asked: WorkingSetSettings,
    models: "Sequence[ModelGeometry]",
    sizes: "Sequence[ModelSizes]",
) -> Table:
    rows = tuple(
        (
            model.title,
            gigabytes(size.weight_bytes),
            f"{size.kv_bytes_per_token:,.0f}",
            f"{size.full_block_bytes / 1e6:,.2f}",
            gigabytes(size.prompt_bytes),
            gigabytes(size.pass_bytes),
            gigabytes(size.read_bytes),
            f"{size.read_bytes / asked.snic_bytes_per_s:.2g}",
            gigabytes(size.pe_cnic_bytes),
            gigabytes(size.agent_bytes),
        )
        for model, size in zip(models, sizes, strict=True)
    )
    title = (
        f"A prompt of {asked.prompt_tokens:,} tokens, an agent of {asked.total_tokens:,.0f}; "
        f"storage NICs of {gigabytes(asked.snic_bytes_per_s)} GB/s; GB, s"
    )
    columns = (
        *("model", "weights", "KV (bytes/token)", "Full Block (MB)"),
        *("prompt: DE buffer", "PE HBM", "SNIC", "SNIC (s)", "PE CNICs", "agent: storage"),
    )
    return Table(title, columns, rows)


def _own(asked: WorkingSetSettings, models: "Sequence[ModelGeometry]") -> "Sequence[Block]":
    rows = []
    for model in models:
        for name, agents_per_s, jct_s in _cases(asked):
            size = working_set_bytes(
                agents_per_s, jct_s, asked.total_tokens, model.kv_bytes_per_token_all_layers
            )
            rows.append(
                (
                    model.title,
                    name,
                    f"{agents_per_s:g}",
                    f"{jct_s:,.0f}",
                    f"{agents_per_s * jct_s:,.0f}",
                    gigabytes(size),
                )
            )
    columns = ("model", "case", "agents/s", "mean JCT (s)", "agents in flight", "KV (GB)")
    table = Table("Working set (§8.2)", columns, tuple(rows), align="llrrrr")
    if asked.gap_factor <= 1:
        return (table,)
    gaps = (
        f"Gaps do not load engines: with a JCT {asked.gap_factor:g} times as long the same "
        f"machines serve {asked.gap_factor:g} times the agents per second, and the working set "
        f"grows {asked.gap_factor**2:g}-fold."
    )
    return table, Notes((gaps,))


def _cases(asked: WorkingSetSettings) -> list[tuple[str, float, float]]:
    if asked.agents_per_s is None or asked.jct_s is None:
        return []
    rate, jct_s = asked.agents_per_s, asked.jct_s
    cases = [("as given", rate, jct_s)]
    if asked.gap_factor > 1:
        factor = asked.gap_factor
        cases.append((f"gaps x{factor:g}, same arrivals", rate, jct_s * factor))
        cases.append((f"gaps x{factor:g}, at capacity", rate * factor, jct_s * factor))
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


def _document(
    asked: WorkingSetSettings,
    models: "Sequence[ModelGeometry]",
    sizes: "Sequence[ModelSizes]",
    paper_bytes_per_token: float,
) -> dict[str, Any]:
    import msgspec

    return {
        "prompt_tokens": asked.prompt_tokens,
        "total_tokens": asked.total_tokens,
        "block_tokens": asked.block_tokens,
        "layer_buffers": asked.layer_buffers,
        "models": [
            {
                "model": model.name,
                **msgspec.to_builtins(size),
                "cases": _case_documents(asked, size.kv_bytes_per_token),
            }
            for model, size in zip(models, sizes, strict=True)
        ],
        "paper": [
            {**quoted._asdict(), "implied_jct_s": _implied_jct_s(quoted, paper_bytes_per_token)}
            for quoted in PAPER
        ],
    }


def _case_documents(asked: WorkingSetSettings, kv_bytes_per_token: float) -> list[dict[str, Any]]:
    return [
        {
            "case": name,
            "agents_per_s": agents_per_s,
            "jct_s": jct_s,
            "working_set_bytes": working_set_bytes(
                agents_per_s, jct_s, asked.total_tokens, kv_bytes_per_token
            ),
        }
        for name, agents_per_s, jct_s in _cases(asked)
    ]
