"""One self-contained HTML page for one or more runs: table, plots, setting. No scripts, no links.

write_html([basic, dualpath, oracle], "report.html")
"""

from collections.abc import Sequence
from html import escape
from pathlib import Path
from string import Template

from dualpath.core.errors import ConfigError
from dualpath.laboratory.workload.plots import all_plots, to_svg
from dualpath.laboratory.workload.replay.result import ReplayResult
from dualpath.laboratory.workload.report import Comparison, compare

PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --page: #ffffff; --ink: #1b1f24; --quiet: #57606a;
  --rule: #d0d7de; --alarm: #b42318; }
@media (prefers-color-scheme: dark) { :root { --page: #12161b; --ink: #e6e9ec;
  --quiet: #9aa4ae; --rule: #333c46; --alarm: #ff8f85; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 1.25rem 1rem 3rem; background: var(--page);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0 0 .75rem; }
h2 { font-size: 1rem; margin: 0 0 .25rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .75rem; text-align: right; white-space: nowrap; }
th:first-child { text-align: left; font-weight: normal; padding-left: 0; }
thead th { border-bottom: 2px solid var(--rule); font-weight: 600; }
tbody tr.section th, tbody tr.section td { border-top: 1px solid var(--rule); }
.notes { color: var(--quiet); font-size: .9rem; max-width: 80ch; overflow-wrap: anywhere; }
.warning { color: var(--alarm); overflow-wrap: anywhere; }
.plots { display: grid; gap: 1.5rem; margin-top: 1.5rem;
  grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); }
figure { margin: 0; min-width: 0; }
svg { width: 100%; height: auto; display: block; }
</style>
</head>
<body>
<h1>$title</h1>
$warnings
<div class="wide">
$table
</div>
<div class="notes">
$notes
</div>
<div class="plots">
$plots
</div>
</body>
</html>
""")


def html_page(results: Sequence[ReplayResult], title: str = "dualpath replay") -> str:
    """Return the page; raise ``ConfigError`` without any run."""
    comparison = compare(results)
    plots = "\n".join(
        f'<figure><h2>{escape(name)}</h2><div role="img" aria-label="{escape(name)}">'
        f"{to_svg(figure, name)}</div></figure>"
        for name, figure in all_plots(results)
    )
    return PAGE.substitute(
        title=escape(title),
        table=_table(comparison),
        notes="\n".join(f"<p>{escape(note)}</p>" for note in comparison.notes),
        warnings="\n".join(
            f'<p class="warning">Warning: {escape(text)}</p>' for text in comparison.warnings
        ),
        plots=plots,
    )


def write_html(
    results: Sequence[ReplayResult], path: str | Path, title: str = "dualpath replay"
) -> None:
    """Write the page to ``path``."""
    page = html_page(results, title)
    try:
        Path(path).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error}); give a writable path") from None


def _table(comparison: Comparison) -> str:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in comparison.columns)
    lines = [f'<table><thead><tr><th scope="col"></th>{heads}</tr></thead><tbody>']
    section = None
    for row in comparison.rows:
        css = ' class="section"' if section not in (None, row.section) else ""
        section = row.section
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row.cells)
        lines.append(f'<tr{css}><th scope="row">{escape(row.name)}</th>{cells}</tr>')
    lines.append("</tbody></table>")
    return "\n".join(lines)
