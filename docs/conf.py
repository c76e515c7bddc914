"""Sphinx settings of the documentation's site.

``make docs`` builds it, or

    sphinx-build -W -c docs . build/docs

The source folder is the repository's root, because README.md is the first page and pages link to
benchmarks and to code. Pages stay plain Markdown: what only the site needs, the navigation, is
here. Links that lead nowhere are errors (``-W``); nothing is loaded from the network.
"""

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

project = "dualpath"
project_copyright = "the dualpath developers, Apache-2.0"
html_title = "dualpath"
root_doc = "README"
extensions = ["myst_parser"]
include_patterns = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/**.md",
    "benchmarks/**.md",
]
#: Folders that are not worth walking; a virtual environment holds thousands.
exclude_patterns = [".*", "build", "dist", "runs", "shared", "src", "tests", "**/node_modules"]

myst_heading_anchors = 4
myst_enable_extensions = ["html_image"]
#: Quotes and dots alone: two dashes in a sentence begin the name of an option.
smartquotes_action = "qe"
#: Fences of languages that Pygments does not know are shown as they are.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_static_path = ["site"]
html_css_files = ["narrow.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False

#: No line ends at the blank between a number and its unit, a sign and its number, a number and the
#: dash of a range. Long units may stand below, or wide tables would not fit.
INSIDE_A_NUMBER = re.compile(
    r"(?<=\d) (?=(?:%|[kKMGT]i?B(?:/s)?|[KMGT]bit/s|[nµm]?s|x|min|h)(?![\w])|- \d)"
    r"|(?<=[≈<≤≥]) (?=\d)"
)

#: The navigation: caption, then pages in order; a pattern adds those not named before it.
NAVIGATION = {
    "Concepts": ("docs/README", "docs/concepts", "docs/comparison"),
    "How to": ("docs/how-to/serve", "docs/how-to/*"),
    "Reference": ("docs/reference/settings", "docs/reference/cli", "docs/reference/*"),
    "Evaluation": (
        "docs/measured",
        "docs/evaluation/lab/*",
        "docs/evaluation/peers/*",
        "docs/evaluation",
        "docs/evaluation/*",
        "docs/simulator",
        "docs/beyond",
        "benchmarks/README",
        "benchmarks/*/README",
        "benchmarks/*/*/README",
    ),
    "Architecture": ("docs/architecture", "docs/limits", "docs/*", "CONTRIBUTING", "CHANGELOG"),
}
#: Pages whose own pages hang below them.
BELOW = {"docs/reference/cli": "docs/reference/cli/*"}


def add_navigation(app: Sphinx, name: str, text: list[str]) -> None:
    """Append to the page `name` the tables of contents that only the site shows."""
    if name == root_doc:
        text[0] += "".join(contents(*group) for group in NAVIGATION.items())
    if name in BELOW:
        text[0] += contents("", (BELOW[name],))


def contents(caption: str, pages: tuple[str, ...]) -> str:
    """Return a hidden table of contents of `pages` in MyST's Markdown."""
    option = f":caption: {caption}\n" if caption else ""
    listed = "\n".join(f"/{page}" for page in pages)
    return f"\n\n```{{toctree}}\n:hidden:\n:glob:\n{option}\n{listed}\n```\n"


def keep_units(app: Sphinx, page: nodes.document, name: str) -> None:
    """Keep numbers and their units on one line, in text and in the narrow columns of tables."""
    for text in list(page.findall(nodes.Text)):
        kept = INSIDE_A_NUMBER.sub("\u00a0", text)
        if kept != text and not isinstance(text.parent, nodes.literal | nodes.literal_block):
            text.parent.replace(text, nodes.Text(kept))


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Let the site's folder open at the first page."""
    if error is None and app.builder.format == "html":
        first = f"{root_doc}.html"
        page = (
            f'<!doctype html><meta charset="utf-8"><title>{project}</title>'
            f'<meta http-equiv="refresh" content="0; url={first}">'
            f'<a href="{first}">{project}</a>\n'
        )
        Path(app.outdir, "index.html").write_text(page, encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Connect the three functions above."""
    app.connect("source-read", add_navigation)
    app.connect("doctree-resolved", keep_units)
    app.connect("build-finished", add_index)
