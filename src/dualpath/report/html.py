"""Reports as self-contained HTML pages: no scripts, no links, light and dark.

Plots are drawn by matplotlib if it is installed; prose is rendered by markdown-it, and the page by
jinja2 from ``page.html.jinja``.
"""

from collections.abc import Iterator

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from dualpath.report.model import Notes, Panel, Plots, Report, Table, Text


def page(report: Report, no_plots_reason: str = "") -> str:
    """Return the page with all parts; deterministic for equal reports.

    ``no_plots_reason`` replaces the plots, if it is given.
    """
    reports = list(_flat(report))
    return _TEMPLATES.get_template("page.html.jinja").render(
        reports=reports, no_plots_reason=no_plots_reason
    )


def _flat(report: Report) -> Iterator[Report]:
    yield report
    for part in report.parts:
        yield from _flat(part)


def _prose(text: str) -> Markup:
    # HTML in the text is escaped: only Markdown is allowed.
    return Markup(MarkdownIt("commonmark", {"html": False}).render(text).strip())


def _drawing(panel: Panel, name: str) -> Markup:
    from dualpath.report.plots import svg

    # Matplotlib's output is escaped already.
    return Markup(svg(panel, name))


_TEMPLATES = Environment(
    loader=PackageLoader("dualpath.report", ""),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
_TEMPLATES.filters |= {"prose": _prose, "svg": _drawing}
for _kind in (Table, Text, Notes, Plots):
    _TEMPLATES.tests[_kind.__name__.lower()] = lambda block, kind=_kind: isinstance(block, kind)
