"""Fig. 15: the large offline run over time."""

from dualpath.report.model import Panel, Series, Table
from dualpath_sim.evaluation.figures.table3 import large_offline, large_spec
from dualpath_sim.evaluation.report import FigureReport, exact
from dualpath_sim.evaluation.runs import Curve, OfflineRun, Runs, Timeline
from dualpath_sim.evaluation.speedups import mean

TITLE = "A large offline run over time (DS 660B)"
DISCUSSION = """\
The text quotes no number of Fig. 15 except that prompt tokens per second are counted in units of
1e7. At 64K the model's rate, hits included, has a maximum of 1.55e8, which a plot would count in
units of 1e8. At 48K, with prefill 1.5 times slower and storage NICs at 28 GB/s (What the model may
lack), the maximum is 9.8e7, and JCT is 3,297 s; the paper's is 3,201 s. As §8.1 says, prefill is
under more pressure in the first half. In the first 450 s the first prompts of all agents are
computed, without hits: nothing is read, every prefill engine computes at its limit, and TTFT is
the wait in the queue.
"""


def build(runs: Runs) -> FigureReport:
    """Draw the run that Table 3 times."""
    settings = runs.settings
    spec = large_spec(runs)
    run = large_offline(runs)
    assert spec.nodes is not None
    line = _timeline(run)
    return FigureReport(
        name="fig15",
        title=TITLE,
        evaluation=settings,
        settings=(
            f"DS 660B on {spec.nodes[0]}P{spec.nodes[1]}D, {spec.workload}, {spec.agents:,} "
            "agents at once, DualPath. Prompt tokens are counted whole at their first token.",
        ),
        tables=(_table(run),),
        panels=(
            _panel(
                run,
                "Tokens per second",
                "tokens/s",
                {
                    "prompt (hits included)": line.prompt_tokens_per_s,
                },
            ),
            _panel(
                run,
                "Tokens computed per second",
                "tokens/s",
                {
                    "prefill (misses)": line.computed_tokens_per_s,
                    "generated": line.generated_tokens_per_s,
                },
            ),
            _panel(
                run,
                "Rounds in the system",
                "rounds",
                {
                    "queued": line.queued,
                    "reading": line.reading,
                    "prefill": line.prefilling,
                    "decode": line.decoding,
                },
            ),
            _panel(run, "TTFT", "mean, s", {"TTFT": line.ttft_s}),
        ),
        results=exact(
            {
                "JCT, s": run.jct_s,
                "largest prompt tokens/s": max(line.prompt_tokens_per_s),
                "mean prompt tokens/s": mean(line.prompt_tokens_per_s),
                "mean TTFT over time, s": mean(line.ttft_s),
            }
        ),
        discussion=DISCUSSION,
    )


def _timeline(run: OfflineRun) -> Timeline:
    assert run.timeline is not None
    return run.timeline


def _panel(run: OfflineRun, title: str, label: str, curves: dict[str, Curve]) -> Panel:
    time_s = _timeline(run).time_s
    series = tuple(Series(name, time_s, values) for name, values in curves.items())
    return Panel(title, "lines", "time, s", label, series)


def _table(run: OfflineRun) -> Table:
    """Return means over each quarter of the run."""
    line = _timeline(run)
    bins = len(line.time_s)
    rows = []
    for quarter in range(4):
        part = slice(quarter * bins // 4, (quarter + 1) * bins // 4)
        rows.append(
            (
                f"{quarter + 1} of 4",
                f"{mean(line.prompt_tokens_per_s[part]):.3g}",
                f"{mean(line.computed_tokens_per_s[part]):.3g}",
                f"{mean(line.generated_tokens_per_s[part]):.3g}",
                f"{mean(line.queued[part]):,.0f}",
                f"{mean(line.reading[part]):,.0f}",
                f"{mean(line.prefilling[part]):,.0f}",
                f"{mean(line.decoding[part]):,.0f}",
                f"{mean(line.ttft_s[part]):.2f}",
            )
        )
    columns = (
        "quarter",
        "prompt tokens/s",
        "computed tokens/s",
        "generated tokens/s",
        "queued",
        "reading",
        "prefill",
        "decode",
        "TTFT, s",
    )
    return Table("Means over quarters of the run", columns, tuple(rows))
