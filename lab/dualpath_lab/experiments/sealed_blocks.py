"""Cost of sealing stored blocks for a job: its JCT and engines' CPU time, compared with plain."""

import statistics
from collections.abc import Iterator

import msgspec

from dualpath.core.modes import Mode
from dualpath.report.model import NOTHING, Table, cell
from dualpath_lab.experiments.engine_nodes import EmulatedEngines
from dualpath_lab.experiments.jct import (
    RATIO_TOLERANCE,
    TIME_TOLERANCE,
    Variant,
    lab_stage,
    published_results,
    setting_lines,
    spoilt,
    summary_of,
)
from dualpath_lab.experiments.runs import (
    LabResult,
    Measured,
    lab_result,
    link_lines,
    load_lines,
    too_busy,
)
from dualpath_lab.experiments.settings import JctSettings
from dualpath_lab.nodes.cluster import LinkReport
from dualpath_lab.nodes.settings import LabSettings
from dualpath_sim.harness.experiment import (
    Experiment,
    KeyResult,
    Page,
    Progress,
    RawData,
    Stage,
    tolerance_of,
)

PLAIN = "none"
KINDS = (PLAIN, "authenticated", "encrypted")
#: Name of the router's counter, in bytes by engine.
_WRITTEN = "snic_write_bytes"


class Sealed(LabResult, frozen=True, kw_only=True, omit_defaults=True):
    """``stored_bytes`` are those that all engines read from and wrote to storage."""

    stored_bytes: int

    @property
    def cpu_s_per_gb(self) -> float:
        """The engines' CPU time per GB read and written."""
        return self.engine_cpu_s / self.stored_bytes * 1e9


def sealed_result(run: Measured, lab: LabSettings, links: tuple[LinkReport, ...]) -> Sealed:
    """Reduce a run."""
    found = lab_result(run, lab, links)
    server = run.client.replay.server
    written = {} if server is None else server.other.get(_WRITTEN, {})
    stored_bytes = run.storage_bytes + int(sum(written.values()))
    return Sealed(stored_bytes=stored_bytes, **msgspec.structs.asdict(found))


def _stages(settings: JctSettings, progress: Progress) -> Iterator[Stage[Variant, Sealed]]:
    replace = msgspec.structs.replace
    cells = {
        _name(mode, kind): Variant(
            mode, EmulatedEngines(replace(settings.emulated, storage_protection=kind))
        )
        for mode in settings.mode
        for kind in KINDS
    }
    yield lab_stage(settings, settings.lab_of(settings.nodes[0]), cells, progress, sealed_result)


def draw(raw: RawData[JctSettings, Sealed]) -> Page:
    """Draw JCT and CPU time of each mode and kind of blocks, compared with plain blocks."""
    return Page(
        settings=(
            *setting_lines(raw.settings),
            "Ratios and differences are of runs of one round, which follow each other; medians "
            "over rounds. CPU time is that of all engines, verification included, per GB read "
            "from or written to storage.",
            *link_lines(raw.results),
            *load_lines(raw, raw.results),
        ),
        tables=(_table(raw),),
        results=tuple(_results(raw)),
        too_busy=too_busy(raw.results),
    )


def _table(raw: RawData[JctSettings, Sealed]) -> Table:
    rows = []
    for mode in raw.settings.mode:
        base = _name(mode, PLAIN)
        for kind in KINDS:
            name = _name(mode, kind)
            runs = raw.of(name)
            if not runs:
                continue
            jct_s = [run.jct_s for run in runs]
            more = [own.cpu_s_per_gb - plain.cpu_s_per_gb for own, plain in raw.paired(name, base)]
            rows.append(
                (
                    mode.value,
                    "plain" if kind == PLAIN else kind,
                    f"{statistics.median(jct_s):.2f}",
                    f"{min(jct_s):.2f} - {max(jct_s):.2f}",
                    cell(raw.ratio(name, base, _jct_s), "{:.3f}"),
                    f"{statistics.median(run.stored_bytes for run in runs) / 1e9:.2f}",
                    f"{statistics.median(run.cpu_s_per_gb for run in runs):.2f}",
                    f"{statistics.median(more):+.2f}" if more and kind != PLAIN else NOTHING,
                    f"{max(run.busy for run in runs):.0%}",
                )
            )
    columns = (
        *("mode", "blocks", "JCT s", "range s", "x plain", "GB", "engines, CPU-s per GB"),
        *("more than plain", "machine busy"),
    )
    return Table("Kinds of stored blocks", columns, tuple(rows))


def _results(raw: RawData[JctSettings, Sealed]) -> Iterator[KeyResult]:
    for mode in raw.settings.mode:
        base = _name(mode, PLAIN)
        plain_s, runs = raw.median(base, _jct_s), len(raw.of(base))
        time, within = (tolerance_of(t, runs) for t in (TIME_TOLERANCE, RATIO_TOLERANCE))
        yield KeyResult(f"{base}: JCT, s", plain_s, tolerance=time)
        for kind in KINDS[1:]:
            ratio = raw.ratio(_name(mode, kind), base, _jct_s)
            what = f"{_name(mode, kind)}: JCT / plain"
            yield KeyResult(what, ratio, tolerance=within, any_machine=True)


def _jct_s(run: Sealed) -> float:
    return run.jct_s


def _name(mode: Mode, kind: str) -> str:
    return f"{mode.value}, {kind}"


def _published(page: Page, settings: JctSettings) -> RawData[JctSettings, Sealed]:
    """Convert ``{"runs": {"mode, kind": [result, …]}}``."""
    modes = {name: Mode(name.partition(",")[0]) for name in page.data["runs"]}
    runs = published_results(page.data["runs"], Sealed, modes)
    return RawData(experiment=SEALED.name, settings=settings, runs=runs)


SEALED = Experiment(
    name="sealed",
    title="Sealed blocks on shaped links",
    settings=JctSettings(nodes=("1P2D",), mode=(Mode.DUALPATH,)),
    result=Sealed,
    stages=_stages,
    draw=draw,
    summary=summary_of,
    too_busy=spoilt,
    fixed=("storage_protection", "vllm"),
    published=_published,
)
