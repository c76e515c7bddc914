"""One self-contained HTML page per report: tables, plots, setting, discussion. No scripts."""

from html import escape

from dualpath.model.evaluation.drawing import panel_figure
from dualpath.model.evaluation.markdown import heading, setting_lines
from dualpath.model.evaluation.report import FigureReport, Table, comparison_table, statement_table
from dualpath.model.evaluation.style import PAGE, to_svg


def html_page(report: FigureReport) -> str:
    """Return the page."""
    tables = list(report.tables)
    if report.statements:
        tables.insert(0, statement_table(report.statements))
    if report.compared:
        tables.insert(0, comparison_table(report.compared, quick=report.evaluation.quick))
    paragraphs = [*setting_lines(report), *report.discussion.strip().split("\n\n")]
    return PAGE.substitute(
        title=escape(heading(report)),
        warnings="",
        table="\n".join(_table(content) for content in tables),
        notes="\n".join(f"<p>{escape(text)}</p>" for text in paragraphs if text),
        plots="\n".join(_plot(report, index) for index in range(len(report.panels))),
    )


def _plot(report: FigureReport, index: int) -> str:
    panel = report.panels[index]
    # Ids inside an SVG derive from its name, which has to be unique on the page.
    picture = to_svg(panel_figure(panel), f"{report.name}-{index}")
    name = escape(panel.title)
    return f'<figure><h2>{name}</h2><div role="img" aria-label="{name}">{picture}</div></figure>'


def _table(content: Table) -> str:
    heads = "".join(f'<th scope="col">{escape(name)}</th>' for name in content.columns)
    lines = [
        f"<h2>{escape(content.title)}</h2>",
        f"<table><thead><tr>{heads}</tr></thead><tbody>",
    ]
    for row in content.rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        lines.append(f'<tr><th scope="row">{escape(row[0])}</th>{cells}</tr>')
    lines.append("</tbody></table>")
    return "\n".join(lines)
