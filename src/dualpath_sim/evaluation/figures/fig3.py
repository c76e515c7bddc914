"""Fig. 3: hardware of three generations, and prefill throughput against the batch (§3)."""

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from dualpath.core.modes import Mode
from dualpath.report.model import Panel, Series, Table, cell
from dualpath_sim.catalog.load import load_model
from dualpath_sim.evaluation.report import FigureReport, Statement, exact
from dualpath_sim.evaluation.runs import Runs
from dualpath_sim.evaluation.settings import DS_27B, DS_660B, RunSpec, System
from dualpath_sim.simulator.settings import PrefillCosts

TITLE = "Hardware trends, and token throughput against the batch"
CONTEXT_TOKENS, APPEND_TOKENS = 30_000, 300
BATCHES = (1, 2, 4, 8, 16, 32, 64)
SYSTEMS = (DS_660B, DS_27B)
#: Of Table 1.
MODELS = ("qwen2.5-32b", "gpt-oss-120b", "qwen3-235b", "ds-v3.2", "ds-v3")
#: What the text says of Ampere to Blackwell.
QUOTED_DECREASE = 14.4


class Generation(NamedTuple):
    """One GPU and its share of a DGX node's compute network, from data sheets.

    ``flop_per_s`` is the dense peak of the narrowest format of its tensor cores that models are
    served in.
    """

    name: str
    gpu: str
    number_format: str
    flop_per_s: float
    hbm_bytes: float
    nic_bytes_per_s: float
    source: str

    @property
    def bytes_per_pflop(self) -> float:
        """Bytes that the NIC brings while the GPU computes 1e15 FLOP."""
        return self.nic_bytes_per_s / self.flop_per_s * 1e15


GENERATIONS = (
    Generation(
        *("Ampere", "A100 SXM", "FP16", 312e12, 80e9, 25e9),
        "data sheets of A100 (nvidia-a100-datasheet, 312 TFLOPS FP16) and DGX A100 (HDR 200 Gb/s)",
    ),
    Generation(
        *("Hopper", "H100 SXM", "FP8", 1979e12, 80e9, 50e9),
        "data sheets of H100 (3,958 TFLOPS FP8 with sparsity, half of it dense) and DGX H100 "
        "(NDR 400 Gb/s)",
    ),
    Generation(
        *("Blackwell", "B200", "FP4", 9000e12, 180e9, 50e9),
        "data sheet of DGX B200 (144 PFLOPS FP4 with sparsity, half of it dense, and 1,440 GB of "
        "HBM for 8 GPUs; 400 Gb/s)",
    ),
)
DISCUSSION = """\
**Left.** The text gives one number, 14.4x, and no data. The peak rates of the formats that each
generation introduced for serving (FP16, FP8, FP4; dense), with one NIC per GPU as in NVIDIA's own
nodes, give this number: 28.8 times the FLOP and 2.0 times the bytes. In FP16 alone (312 to 2,250
TFLOP/s) the decrease would be 3.6x.

**What models need** is Table 1's cache-compute ratio, with the same request as on the right. A GPU
that computes at its peak waits for storage if its NIC brings fewer bytes per PFLOP than this. Real
kernels reach a third of the peak or less, which moves the limit by the same factor.

**Right.** The paper does not name the model. Here a pass of one prefill engine takes the time that
the simulator charges: kernels in proportion to tokens, and a fixed time per pass (launches,
latency of the all-to-all). The simulator does not model that kernels are slower for small
matrices, so the curve of a real GPU rises longer. The last column is the number of requests that
fit into HBM with all layers of their KV, as in Basic.
"""


def build(runs: Runs) -> FigureReport:
    """Draw both panels; nothing is simulated but the costs of a pass."""
    found = {
        one: runs.computed(f"a pass of {one.title}", partial(_pass, runs, one)) for one in SYSTEMS
    }
    rates = {one: _relative(numbers) for one, numbers in found.items()}
    fitting = {one: numbers["requests_in_hbm"] for one, numbers in found.items()}
    asked = runs.computed("cache-compute ratios, GB/PFLOP", _ratios)
    first, last = GENERATIONS[0], GENERATIONS[-1]
    decrease = first.bytes_per_pflop / last.bytes_per_pflop
    flop = last.flop_per_s / first.flop_per_s
    nic = last.nic_bytes_per_s / first.nic_bytes_per_s
    return FigureReport(
        name="fig3",
        title=TITLE,
        evaluation=runs.settings,
        settings=(
            *(f"{one.name}, {one.gpu}: {one.source}." for one in GENERATIONS),
            f"Right: {CONTEXT_TOKENS:,} tokens of context and {APPEND_TOKENS} appended per "
            "request, one prefill engine of the systems of §7.2.",
        ),
        tables=(_hardware(), _asked(asked), _throughput(rates, fitting)),
        panels=(_trend(), _batches(rates)),
        statements=(
            Statement(
                "§3",
                "from Ampere to Blackwell the I/O-compute ratio decreases by 14.4x",
                abs(decrease / QUOTED_DECREASE - 1) <= 0.01,
                f"{decrease:.1f}x: {flop:.1f}x the FLOP, {nic:.1f}x the NIC",
            ),
        ),
        results=exact(
            {
                f"{name}, GB/PFLOP at {CONTEXT_TOKENS:,} tokens": ratio
                for name, ratio in asked.items()
            }
            | {
                f"{one.title}, tokens/s with {BATCHES[0]} request relative to {BATCHES[-1]}": rate
                for one, (rate, *_) in rates.items()
            }
        ),
        discussion=DISCUSSION,
    )


def _hardware() -> Table:
    columns = ("", "GPU", "format", "peak, TFLOP/s", "HBM, GB", "NIC, GB/s", "GB per PFLOP")
    rows = tuple(
        (
            one.name,
            one.gpu,
            one.number_format,
            f"{one.flop_per_s / 1e12:,.0f}",
            f"{one.hbm_bytes / 1e9:.0f}",
            f"{one.nic_bytes_per_s / 1e9:.0f}",
            f"{one.bytes_per_pflop / 1e9:.1f}",
        )
        for one in GENERATIONS
    )
    return Table("Three generations", columns, rows)


def _ratios() -> dict[str, float]:
    """Return Table 1's ratio of every model for the figure's request."""
    models = map(load_model, MODELS)
    return {one.title: one.cache_compute_ratio(CONTEXT_TOKENS, APPEND_TOKENS) for one in models}


def _asked(ratios: Mapping[str, float]) -> Table:
    """Return Table 1's ratio for the figure's request, beside what a generation's NIC brings."""
    columns = ("model", "asks for, GB per PFLOP", *(one.name for one in GENERATIONS))
    rows = []
    for title, asked in ratios.items():
        brought = [one.bytes_per_pflop / 1e9 / asked for one in GENERATIONS]
        rows.append((title, f"{asked:.0f}", *(f"{share:.2f}" for share in brought)))
    return Table("Cache-compute ratio, and the share of it that a NIC brings", columns, tuple(rows))


def _trend() -> Panel:
    first = GENERATIONS[0]
    names = tuple(one.name for one in GENERATIONS)
    grown = {
        "FLOP": [one.flop_per_s / first.flop_per_s for one in GENERATIONS],
        "HBM": [one.hbm_bytes / first.hbm_bytes for one in GENERATIONS],
        "NIC": [one.nic_bytes_per_s / first.nic_bytes_per_s for one in GENERATIONS],
        "NIC to FLOP": [one.bytes_per_pflop / first.bytes_per_pflop for one in GENERATIONS],
    }
    series = tuple(Series(name, names, tuple(values)) for name, values in grown.items())
    return Panel("Relative to Ampere", "grouped", "generation", "times", series)


def pass_s(costs: PrefillCosts, requests: int) -> float:
    """Return the seconds of a forward pass of so many requests of the figure."""
    tokens = requests * APPEND_TOKENS
    seen = min(costs.window_tokens or CONTEXT_TOKENS, CONTEXT_TOKENS)
    per_token_s = (
        costs.attention_token_s
        + seen * costs.pair_s
        + CONTEXT_TOKENS * costs.index_pair_s
        + costs.feed_forward_token_s
    )
    compute_s, exchange_s = tokens * per_token_s, tokens * costs.exchange_token_s
    busy_s = max(compute_s, exchange_s) if costs.interleaved else compute_s + exchange_s
    return costs.batch_s + costs.attention_batch_s + busy_s


def _pass(runs: Runs, system: System) -> dict[str, float]:
    """Return the times of passes by requests, and how many requests fit into HBM."""
    setup = runs.setup(RunSpec(system=system, mode=Mode.DUALPATH, workload="64K"))
    request_bytes = (CONTEXT_TOKENS + APPEND_TOKENS) * setup.model.kv_bytes_per_token
    times_s = {f"{n} requests, s": pass_s(setup.model.prefill, n) for n in BATCHES}
    return times_s | {"requests_in_hbm": setup.cluster.prefill_hbm_bytes / request_bytes}


def _relative(numbers: Mapping[str, float]) -> list[float | None]:
    """Return tokens per second of each batch over those of the largest."""
    taken_s = [numbers[f"{requests} requests, s"] / requests for requests in BATCHES]
    return [taken_s[-1] / one if one > 0 else None for one in taken_s]


def _throughput(rates: dict[System, list[float | None]], fitting: dict[System, float]) -> Table:
    columns = ("model", *(str(requests) for requests in BATCHES), "requests that fit HBM")
    rows = tuple(
        (one.title, *(cell(rate, "{:.2f}") for rate in rates[one]), f"{fitting[one]:.0f}")
        for one in rates
    )
    return Table("Token throughput by requests in a batch, 64 being 1", columns, rows)


def _batches(rates: dict[System, list[float | None]]) -> Panel:
    series = tuple(Series(one.title, BATCHES, tuple(rates[one])) for one in rates)
    return Panel("Token throughput", "lines", "requests in a batch", "relative to 64", series)
