"""Draw the pages and plots of measurements from the data that is stored with them.

    python docs/draw_lab.py          write the tables of docs/evaluation/*.md and all plots
    python docs/draw_lab.py --check  exit with 1 if a table is not what its data says
    python docs/draw_lab.py --merge FILE…
                                     add results of `dualpath chaos simulate --json`, `dualpath
                                     chaos fuzz --json` and `dualpath chaos run --out` to the data
                                     of Hardening, and draw

The prose of a page is written by hand.  A table, or the lines on how to repeat its runs, stands
between two marks,

    <!-- drawn: KIND NAME… -->
    <!-- end -->

and is drawn from ``docs/evaluation/lab/NAME.json``, ``peers-matrix`` from the files of runs in
``docs/evaluation/peers/cells``.  The page ``docs/reference/hardening.md`` is drawn as well: results
of seeds, fuzzing and faults of parts of engines are in ``docs/evaluation/hardening``.  ``DRAWN``
lists the kinds.
"""

import itertools
import re
import shlex
import sys
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from dualpath.report.files import drawn
from dualpath.report.markdown import table as as_markdown
from dualpath.report.model import NOTHING, Table
from dualpath_lab.benchmarks.peers.matrix import jct_by_regime, read_regimes
from dualpath_lab.cli.chaos import CHAOS
from dualpath_lab.cli.lab import BENCH
from dualpath_lab.faults.failpoints import EngineKind
from dualpath_lab.faults.matrix import Fault
from dualpath_lab.faults.report import FAULTS
from dualpath_sim.harness.experiment import KeyResult, Page, compared_words, target_table
from dualpath_sim.harness.files import read as read_page

EVALUATION = Path(__file__).parent / "evaluation"
LAB = EVALUATION / "lab"
HARDENING = EVALUATION / "hardening"
PAGES = (*sorted(EVALUATION.glob("*.md")), EVALUATION.parent / "reference" / "hardening.md")

_MARK = re.compile(r"(<!-- drawn: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)

#: What a run is called in tables; the name of its file otherwise.
LABELS = {
    "jct-1p1d": "1P1D",
    "jct-2p1d": "2P1D",
    "jct-1p2d": "1P2D",
    "jct-2p4d": "2P4D",
    "jct-trace-1p1d": "1P1D, recorded sessions",
    "jct-trace-1p2d": "1P2D, recorded sessions",
    "jct-trace-2p4d": "2P4D, recorded sessions",
    "jct-tp2-1p2d": "1P2D, engines of two ranks",
    "jct-vllm-1p1d": "1P1D, real vLLM engines",
    "jct-vllm-1p2d": "1P2D, real vLLM engines",
    "jct-node-groups-2p4d": "2P4D, an engine group per node",
    "jct-balanced": "24 agents",
    "jct-balanced-48-agents": "48 agents",
    "jct-balanced-longer-passes": "24 agents, longer passes",
    "attention-balance": "emulated ranks",
    "attention-balance-vllm": "vLLM on CPUs",
    "dram-pauses": "half of the working set",
    "dram-pauses-all": "twice the working set",
    "chaos-run": "all components, up to 5 faults at once",
    "chaos-blocks": "small blocks, no router faults",
    "chaos-blocks-2": "small blocks, engines drain",
    "chaos-ranks": "engines of two ranks",
    "chaos-groups": "data-parallel groups of two",
    "chaos-vllm": "real vLLM engines, up to 2 faults at once",
    "simulator": "bound by storage",
    "simulator-balanced": "storage and compute in balance",
}

#: Columns of a stored table by which a reader of these pages would be puzzled.
_HEADS = {
    "who": "measured",
    "dualpath relative to it": "DualPath relative to it",
    "x oracle": "to Oracle",
    "x oracle's": "TTFT to Oracle",
    "x plain": "JCT to plain",
    "to plain": "CPU to plain",
    "well": "correct",
    "left": "client left",
    "bad": "late or wrong",
    "fits": "DRAM holds",
}


def label(name: str) -> str:
    """Return what a run is called in tables."""
    return LABELS.get(name, name)


def read(name: str) -> Page:
    """Return the page of a stored experiment."""
    return read_page(LAB / f"{name}.json")


def stored_table(report: Page, title: str) -> Table:
    """Return the experiment's one table whose title contains ``title``."""
    (found,) = (one for one in report.tables if title in one.title)
    return found


def column(content: Table, name: str) -> dict[str, str]:
    """Return a column's cells by the first column's."""
    index = content.columns.index(name)
    return {row[0]: row[index] for row in content.rows}


def commands(*names: str) -> Table:
    """Which command made each run, how busy the machine was, how many blocks were compared."""
    rows = []
    for name in names:
        report = read(name)
        lines = " ".join(report.settings)
        busy = re.search(r"Machine at most (\d+%) busy|, (\d+% to \d+%) busy|, (\d+%) busy", lines)
        compared = re.search(r"([\d,]+) Layer Blocks compared on arrival, none wrong", lines)
        rows.append(
            (
                label(name),
                f"`{report.command}`",
                next(filter(None, busy.groups())) if busy else NOTHING,
                compared[1] if compared else NOTHING,
            )
        )
    return Table("", ("run", "command", "machine busy", "Layer Blocks compared"), tuple(rows))


def ratios(*names: str) -> Table:
    """How much faster each mode is than Basic, beside what the links allow."""
    modes = ("layerwise", "round-robin", "dualpath", "split")
    rows = []
    for name in names:
        found = _jct_table(read(name))
        size = re.match(r"\w+: (\d+) agents, ([\d.]+)x", found.title)
        assert size is not None
        faster = column(found, "speed-up over basic")
        jct_s = column(found, "JCT s")
        rows.append(
            (
                label(name),
                *(size[1], size[2], jct_s["basic"]),
                *(faster.get(mode, NOTHING) for mode in modes),
            )
        )
    heads = ("run", "agents", "links allow", "Basic, JCT s", *(f"`{mode}`" for mode in modes))
    return Table("", heads, tuple(rows))


def jct(*names: str) -> Table:
    """Every mode of every run: times, use and balance of storage NICs, processor time."""
    rows: list[tuple[str, ...]] = []
    for name in names:
        report = read(name)
        times = _jct_table(report)
        balance_table = stored_table(report, "Balance of storage NICs")
        balance = dict(zip(balance_table.columns, balance_table.rows[0], strict=True))
        cost_title = next(
            one.title for one in report.tables if "verification of every" in one.title
        )
        costs = {row[1]: row[2] for row in stored_table(report, cost_title).rows}
        for row in times.rows:
            cells = dict(zip(times.columns, row, strict=True))
            mode = cells["mode"]
            rows.append(
                (
                    label(name),
                    f"`{mode}`",
                    *(cells[head] for head in ("JCT s", "range s", "x oracle", "mean TTFT s")),
                    cells["read GB"],
                    cells["SNIC use, mean"],
                    balance.get(mode, NOTHING),
                    costs.get(mode, NOTHING),
                    cells["machine busy"],
                )
            )
    heads = (
        *("run", "mode", "JCT s", "range s", "to Oracle", "mean TTFT s", "read GB"),
        *("SNIC use", "SNIC max/avg", "engines, CPU-s per GB", "machine busy"),
    )
    return Table("", heads, tuple(rows))


def _jct_table(report: Page) -> Table:
    return stored_table(report, "x is ideal")


def stack(title: str, *names: str) -> Table:
    """Tables of one title of several runs below each other; of one run without its name."""
    tables = [stored_table(read(name), title) for name in names]
    heads = tuple(_HEADS.get(head, head) for head in tables[0].columns)
    if len(names) == 1:
        return Table("", heads, tables[0].rows)
    rows = [
        (label(name), *row) for name, one in zip(names, tables, strict=True) for row in one.rows
    ]
    return Table("", ("run", *heads), tuple(rows))


def targets(name: str) -> Table:
    """What was aimed at, beside what was reached."""
    found = target_table(read(name).results)
    return Table("", found.columns[:-1], tuple(row[:-1] for row in found.rows))


def campaigns(*names: str) -> Table:
    """Campaigns of faults: how requests ended, and what else was counted."""
    rows = []
    for name in names:
        report = read(name)
        counts = column(stored_table(report, "Requests and blocks"), "number")
        found = {target.what: f"{target.measured:g}" for target in report.results}
        made = re.search(r"([\d,]+) faults in", " ".join(report.settings))
        assert made is not None
        rows.append(
            (
                label(name),
                made[1],
                *(counts[one] for one in ("well", "clear error", "cut", "left")),
                " / ".join(counts[one] for one in ("late", "wrong", "unclear")),
                found["requests lost to one fault of one engine"],
                found["things left in a calm cluster"],
                found["KV found wrong where it arrived"],
                counts["blocks loaded and right"],
                counts["blocks refused when read"],
            )
        )
    heads = (
        *("campaign", "faults", "correct", "clear error", "cut", "client left"),
        *("late / wrong / unclear", "lost to one fault", "leaked", "wrong KV"),
        *("blocks loaded", "blocks refused"),
    )
    return Table("", heads, tuple(rows))


def kinds_of_faults(*names: str) -> Table:
    """How often each fault was made in real processes, and at how many steps of requests."""
    made: Counter[tuple[str, str]] = Counter()
    steps: dict[tuple[str, str], set[str]] = defaultdict(set)
    matrices = [read(name).data["matrix"] for name in names]
    for cell in itertools.chain(*matrices, *(one["result"]["matrix"] for one in part_runs())):
        kind = cell["component"], cell["fault"]
        made[kind] += cell["made"]
        if cell["made"]:
            steps[kind].add(cell["step"])
    rows = [(*kind, f"{made[kind]:,}", str(len(steps[kind]))) for kind in sorted(made)]
    total = ("all", "", f"{sum(made.values()):,}", str(len(set().union(*steps.values()))))
    return Table("", ("component", "fault", "made", "at steps"), (*rows, total), "llrr")


def part_runs() -> list[dict[str, Any]]:
    """Stored campaigns of faults of one process, thread or port: name, command, result."""
    return [
        msgspec.json.decode(path.read_bytes()) for path in sorted(HARDENING.glob("faults-*.json"))
    ]


#: Faults of one part of an engine, as the table of parts names them.
_PART_FAULTS = {
    Fault.KILL_ONE.value: "SIGKILL",
    Fault.STOP_ONE.value: "SIGSTOP",
    Fault.HANG.value: "hangs",
}
_KINDS_OF_ENGINES = {EngineKind.EMULATED.value: "emulated", EngineKind.VLLM.value: "vLLM"}
#: The thread in which both kinds of engines start.
_MAIN_THREAD = {EngineKind.EMULATED.value: "HTTP server", EngineKind.VLLM.value: "engine core"}


def parts_of_engines() -> Table:
    """Which process or thread of an engine was killed, stopped or made to hang, how often."""
    made: dict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    for one in part_runs():
        for cell in one["result"]["matrix"]:
            for part, count in cell["parts"].items():
                named = re.sub(r"\b[pd]e-\d+-", "", part)  # an engine's name in that of its thread
                named = named.replace("MainThread", f"of the {_MAIN_THREAD[one['engines']]}")
                kind = named, _PART_FAULTS[cell["fault"]], cell["component"]
                made[kind][one["engines"]] += count
    rows = [
        (*kind, *(f"{made[kind][engines]:,}" for engines in _KINDS_OF_ENGINES))
        for kind in sorted(made)
    ]
    kinds = (f"{kind} engines" for kind in _KINDS_OF_ENGINES.values())
    heads = ("process or thread", "fault", "component", *kinds)
    return Table("", heads, tuple(rows), "lllrr")


def part_campaigns() -> Table:
    """Campaigns of faults of one part of an engine: how requests ended, what was left behind."""
    runs = part_runs()
    counts = [_ended(one["result"]) for one in runs]
    names = [(one["name"], _KINDS_OF_ENGINES[one["engines"]]) for one in runs]
    names.append(("all", ""))
    counts.append([sum(column) for column in zip(*counts, strict=True)])
    rows = []
    for name, (faults, *ended, late, wrong, unclear, lost, left, wrong_kv, stale, loaded) in zip(
        names, counts, strict=True
    ):
        bad = f"{late} / {wrong} / {unclear}"
        after = (lost, left, wrong_kv, stale, loaded)
        rows.append(
            (*name, f"{faults:,}", *(f"{n:,}" for n in ended), bad, *map("{:,}".format, after))
        )
    heads = (
        *("campaign", "engines", "faults", "correct", "clear error", "cut", "client left"),
        *("late / wrong / unclear", "lost to one fault", "left behind", "wrong KV"),
        *("in failed attempts", "blocks loaded"),
    )
    return Table("", heads, tuple(rows), "ll" + "r" * 11)


def _ended(result: dict[str, Any]) -> list[int]:
    """Return the numbers of one campaign, in the order of the columns."""
    outcomes = ("well", "clear error", "cut", "left", "late", "wrong", "unclear")
    return [
        result["faults"],
        *(result["outcomes"].get(outcome, 0) for outcome in outcomes),
        len(result["lost_to_single_fault"]),
        len(result["leaks"]) + sum(result["problems"].values()),
        *(result["wrong_kv"], result.get("stale_kv", 0), result["loaded_blocks"]),
    ]


def part_commands() -> Table:
    """The commands of the campaigns of parts."""
    rows = tuple((one["name"], f"`{one['command']}`") for one in part_runs())
    return Table("", ("campaign", "command"), rows)


#: The sums that are drawn of seeds.
_SUMMED = ("seeds", "faults", "requests", "answered", "events")


def simulated_seeds() -> Table:
    """Simulated clusters: contiguous ranges of seeds, and what they had in sum."""
    stored = msgspec.json.decode((HARDENING / "seeds.json").read_bytes())
    ranges: list[dict[str, Any]] = []
    for part in sorted(stored, key=lambda one: one["first"]):
        last = ranges[-1] if ranges else None
        if last is None or last["first"] + last["seeds"] != part["first"]:
            ranges.append(dict(part))
            continue
        for name in (*_SUMMED, "virtual_s", "failing"):
            last[name] = last[name] + part[name]
    rows = [
        (
            f"{one['first']:,} to {one['first'] + one['seeds'] - 1:,}",
            *(f"{one[name]:,}" for name in _SUMMED),
            f"{one['virtual_s'] / 3600:,.1f}",
            ", ".join(map(str, one["failing"])) or "none",
        )
        for one in ranges
    ]
    heads = (
        *("seeds", "clusters", "faults", "requests", "answered in full", "events"),
        *("hours of virtual time", "seeds with problems"),
    )
    return Table("", heads, tuple(rows), "lrrrrrrl")


def fuzzed() -> Table:
    """What parsers were fuzzed with, and how they answered."""
    rows = []
    for path in sorted(HARDENING.glob("fuzz-*.json")):
        one = msgspec.json.decode(path.read_bytes())
        came = ", ".join(f"{number:,} {name}" for name, number in one["outcomes"].items())
        grown_mib = (one["end_bytes"] - one["warm_bytes"]) / (1 << 20)
        cells = (one["subject"], str(one["seed"]), f"{one['count']:,}", came)
        rows.append((*cells, f"{one['findings_total']:,}", f"{grown_mib:+.1f}"))
    heads = ("subject", "seed", "inputs", "outcomes", "findings", "memory, MiB")
    return Table("", heads, tuple(rows), "lrrlrr")


def merge(paths: Sequence[str]) -> None:
    """Add results to the stored ones; a result of the same seeds replaces the stored one.

    Raises ``SystemExit`` for a file of another command, and for ranges of seeds that overlap.
    """
    seeds_file = HARDENING / "seeds.json"
    stored = msgspec.json.decode(seeds_file.read_bytes()) if seeds_file.exists() else []
    parts = {part["first"]: part for part in stored}
    for path in map(Path, paths):
        result = msgspec.json.decode(path.read_bytes())
        if "subject" in result:
            target = HARDENING / f"fuzz-{result['subject']}.json"
            target.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
            continue
        if result.get("data", {}).get("experiment") == FAULTS.name:
            target = HARDENING / f"faults-{result['name']}.json"
            target.write_bytes(msgspec.json.format(msgspec.json.encode(_campaign(result))) + b"\n")
            continue
        if "first" not in result:
            raise SystemExit(
                f"{path} has neither `first` nor `subject` nor the data of a campaign; make it "
                "with `dualpath chaos simulate --json`, `dualpath chaos fuzz --json` or `dualpath "
                "chaos run --out`"
            )
        parts[result["first"]] = result
    if not parts:
        return
    ordered = [parts[first] for first in sorted(parts)]
    for one, following in itertools.pairwise(ordered):
        if one["first"] + one["seeds"] > following["first"]:
            raise SystemExit(
                f"seeds from {one['first']} and from {following['first']} overlap; remove one of "
                f"them from {seeds_file}"
            )
    seeds_file.write_bytes(msgspec.json.format(msgspec.json.encode(ordered)) + b"\n")


def _campaign(page: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored of a campaign's page."""
    (run,) = page["data"]["runs"]
    return {
        "name": page["name"],
        "command": page["command"],
        "engines": page["data"]["settings"]["campaign"]["engines"],
        "date": page["data"]["date"],
        "result": run["result"],
    }


def matrix(_: str) -> Table:
    """Every regime beside every stack."""
    return jct_by_regime(read_regimes(EVALUATION / "peers" / "cells"))


def check(experiment: str, *names: str) -> str:
    """How an experiment's runs are repeated, and what of them is compared."""
    group, word = (CHAOS, "run") if experiment == "chaos-run" else (BENCH, experiment)
    entry = group.entries[word].load()
    results: list[tuple[KeyResult, bool]] = []
    for name in names:
        stored = read(name)
        raw = group.raw_data(entry, stored)
        page = entry.page(raw, stored.name, stored.command)
        results += [(one, raw.machine is not None) for one in page.results]
    results.sort(key=lambda found: (found[0].tolerance is None, not found[0].any_machine))
    allowed = Counter(_allowed(one, has_processor) for one, has_processor in results)
    numbers = ", ".join(f"{count} {words}" for words, count in allowed.items())
    file = names[0] if len(names) == 1 else "NAME"
    command = "dualpath chaos run" if group is CHAOS else f"dualpath lab bench {experiment}"
    return textwrap.fill(
        f"`{command} --check docs/evaluation/lab/{file}.json` repeats a run and compares its key "
        f"results: {numbers}.",
        width=105,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _allowed(result: KeyResult, has_processor: bool) -> str:
    """Return how a rerun's number is compared; times only if the runs' processor is recorded."""
    if result.tolerance is None:
        return "must meet a limit"
    if result.any_machine or has_processor:
        return compared_words(result)
    return "not compared (processor not recorded)"


#: What stands between marks, by the first word of the mark.
DRAWN: dict[str, Callable[..., Table | str]] = {
    "check": check,
    "commands": commands,
    "ratios": ratios,
    "jct": jct,
    "stack": stack,
    "targets": targets,
    "campaigns": campaigns,
    "matrix": matrix,
    "kinds-of-faults": kinds_of_faults,
    "parts-of-engines": parts_of_engines,
    "part-campaigns": part_campaigns,
    "part-commands": part_commands,
    "seeds": simulated_seeds,
    "fuzz": fuzzed,
}


def legible_table(content: Table) -> Table:
    """Return a table without columns that hold nothing, names of runs to the left."""
    kept = [
        index
        for index, cells in enumerate(zip(*content.rows, strict=True))
        if set(cells) != {NOTHING}
    ]
    right = ["r" if is_right else "l" for is_right in content.right]
    if content.columns[0] in ("run", "campaign"):
        right[0] = "l"
    return Table(
        content.title,
        tuple(content.columns[index] for index in kept),
        tuple(tuple(row[index] for index in kept) for row in content.rows),
        "".join(right[index] for index in kept),
    )


def with_tables(page: str) -> str:
    """Return a page with its tables and lines as the data says."""

    def redrawn(found: re.Match[str]) -> str:
        kind, *words = shlex.split(found[2])
        content = DRAWN[kind](*words)
        text = content if isinstance(content, str) else as_markdown(legible_table(content))
        return f"{found[1]}\n{text}\n\n{found[3]}"

    return _MARK.sub(redrawn, page)


def pages() -> dict[Path, str]:
    """Return every page with drawn tables, as it should be."""
    texts = {path: path.read_text(encoding="utf-8") for path in PAGES}
    return {path: with_tables(text) for path, text in texts.items()}


def current() -> bool:
    """Return whether every table on disk is what its data says."""
    return all(path.read_text(encoding="utf-8") == text for path, text in pages().items())


def main(arguments: Sequence[str]) -> int:
    """Draw everything, or check the tables; return the exit code."""
    if "--check" in arguments:
        return int(not current())
    if arguments and arguments[0] == "--merge":
        merge(arguments[1:])
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")
    for path in LAB.glob("*.json"):
        # Campaigns of faults have no plots.
        if path.with_suffix(".png").exists():
            path.with_suffix(".png").write_bytes(*drawn(read_page(path).report()).values())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
