"""Reports as one self-contained HTML page each: no scripts, no links, light or dark.

matplotlib draws plots, where it is installed; markdown-it reads prose, and jinja2 fills in
``page.html.jinja``.
"""

from collections.abc import Iterator

from jinja2 import Environment, PackageLoader, StrictUndefined
from markdown_it import MarkdownIt
from markupsafe import Markup

from dualpath.report.model import Notes, Panel, Plots, Report, Table, Text


def page(report: Report, undrawn: str = "") -> str:
    """Return the page, its parts below each other; the same bytes for the same report.

    ``undrawn`` stands in the place of plots, if it is given.
    """
    reports = list(_flat(report))
    return _TEMPLATES.get_template("page.html.jinja").render(reports=reports, undrawn=undrawn)


def _flat(report: Report) -> Iterator[Report]:
    yield report
    for part in report.parts:
        yield from _flat(part)


def _prose(text: str) -> Markup:
    # Markup in the text is escaped: it is Markdown alone.
    return Markup(MarkdownIt("commonmark", {"html": False}).render(text).strip())


def _drawing(panel: Panel, name: str) -> Markup:
    from dualpath.report.pictures import svg

    # What matplotlib writes is escaped already.
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
