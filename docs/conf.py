"""Sphinx settings of the documentation's site.

``make docs`` builds it, or

    sphinx-build -W -c docs . build/docs

The source folder is the repository's root, because README.md is the first page and pages link to
benchmarks and to code. Pages stay plain Markdown: what only the site needs, the navigation, is
here. Links that lead nowhere are errors (``-W``); nothing is loaded from the network.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

ROOT = Path(__file__).parents[1]

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
    "lab/dualpath_lab/benchmarks/**.md",
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

#: The navigation: caption, then pages in order; a pattern adds those that are named nowhere.
NAVIGATION = {
    "Understand": ("docs/concepts", "docs/comparison", "docs/reference/paper", "docs/limits"),
    "Start": (
        "docs/how-to/quick-start",
        "docs/how-to/install",
        "docs/how-to/serve",
        "docs/how-to/separate-machines",
        "docs/how-to/other-proxies",
        "docs/how-to/clients",
        "docs/how-to/request-kinds",
        "docs/how-to/configure",
        "docs/how-to/size",
        "docs/how-to/gpu",
        "docs/how-to/groups",
        "docs/how-to/containers",
        "docs/how-to/kubernetes",
        "docs/how-to/systemd",
        "docs/how-to/slurm",
        "docs/how-to/ray",
    ),
    "Operate": (
        "docs/how-to/troubleshoot",
        "docs/how-to/monitor",
        "docs/how-to/dashboard",
        "docs/how-to/restart",
        "docs/how-to/dram",
        "docs/how-to/sessions",
        "docs/how-to/queue",
        "docs/how-to/storage",
        "docs/how-to/scale-out",
        "docs/how-to/roles",
        "docs/how-to/rollouts",
        "docs/how-to/security",
        "docs/how-to/qos",
        "docs/reference/threat-model",
    ),
    "Measure": (
        "docs/how-to/replay",
        "docs/how-to/simulate",
        "docs/how-to/profile",
        "docs/how-to/read-a-trace",
        "docs/how-to/lab",
        "docs/how-to/emulate",
        "docs/how-to/agent-benchmarks",
        "docs/how-to/chaos",
        "docs/how-to/*",
    ),
    "Results": (
        "docs/measured",
        "docs/evaluation/*",
        "docs/evaluation/*/*",
        "docs/evaluation",
        "docs/candidates",
        "docs/simulator",
        "docs/beyond",
        "lab/dualpath_lab/benchmarks/README",
        "lab/dualpath_lab/benchmarks/*/README",
        "lab/dualpath_lab/benchmarks/*/*/README",
    ),
    "Reference": ("docs/reference/settings", "docs/reference/cli", "docs/reference/*"),
    "Internals": (
        "docs/architecture",
        "docs/reference/control-protocol",
        "docs/reference/data-path",
        "docs/reference/storage-format",
        "docs/how-to/record-decisions",
        "docs/reference/simulated-faults",
        "docs/reference/hardening",
        "docs/*",
        "CONTRIBUTING",
        "CHANGELOG",
    ),
}
#: Pages whose own pages hang below them.
BELOW = {"docs/reference/cli": "docs/reference/cli/*"}
#: What people search for, where the search would not find it by itself: it ignores numbers, and
#: ranks words of the text low.
KEYWORDS = {
    "docs/how-to/troubleshoot": (
        *("400", "408", "413", "421", "429", "431", "500", "503", "504"),
        *("out of memory", "OOM", "CUDA out of memory", "timeout", "doctor", "log"),
    ),
    "docs/how-to/queue": ("priority", "fairness", "backpressure", "rate limit", "429", "overload"),
    "docs/how-to/qos": ("QoS", "traffic class", "service level", "DSCP", "RoCE", "InfiniBand"),
    "docs/how-to/security": ("TLS", "authentication", "API key", "encryption", "tenant"),
    "docs/how-to/separate-machines": ("vllm serve", "multi-node", "tensor parallel"),
    "docs/how-to/other-proxies": (
        *("llm-d", "kv_transfer_params", "disaggregated", "sidecar", "KV events"),
    ),
    "docs/how-to/monitor": ("Prometheus", "Grafana", "OpenTelemetry", "alerts"),
    "docs/how-to/restart": ("high availability", "failover", "standby", "drain", "upgrade"),
    "docs/how-to/dram": ("cache", "eviction", "offloading"),
    "docs/how-to/sessions": ("prefetch", "retain"),
    "docs/how-to/storage": ("S3", "3FS", "NFS", "GPUDirect Storage", "quota", "disk full"),
    "docs/how-to/scale-out": ("load balancer", "replicas", "shards"),
    "docs/how-to/request-kinds": ("LoRA", "fp8", "EAGLE", "MTP", "images"),
    "docs/how-to/rollouts": ("reinforcement learning", "RL", "RLHF", "sleep", "update_weights"),
    "docs/how-to/groups": ("data parallel", "expert parallel", "MoE"),
    "docs/how-to/containers": ("Docker", "podman"),
    "docs/how-to/kubernetes": ("Helm", "LeaderWorkerSet", "InferencePool"),
}


def add_navigation(app: Sphinx, name: str, text: list[str]) -> None:
    """Add to the page `name` what only the site shows: tables of contents, words to search for."""
    if name == root_doc:
        text[0] += "".join(contents(*group) for group in NAVIGATION.items())
    if name in BELOW:
        text[0] += contents("", (BELOW[name],))
    if name in KEYWORDS:
        heading, rest = text[0].split("\n", 1)
        entries = "".join(f"\n```{{index}} ! {word}\n```\n" for word in KEYWORDS[name])
        text[0] = f"{heading}\n{entries}{rest}"


def contents(caption: str, pages: tuple[str, ...]) -> str:
    """Return a hidden table of contents of `pages` in MyST's Markdown."""
    option = f":caption: {caption}\n" if caption else ""
    listed = "\n".join(f"/{page}" for page in matching(pages))
    return f"\n\n```{{toctree}}\n:hidden:\n{option}\n{listed}\n```\n"


def matching(pages: tuple[str, ...]) -> Iterator[str]:
    """Yield `pages` with those that their patterns match and no part of the navigation names."""
    named = {page for group in NAVIGATION.values() for page in group}
    for page in pages:
        if "*" not in page:
            yield page
        else:
            found = (path.relative_to(ROOT).with_suffix("") for path in ROOT.glob(f"{page}.md"))
            yield from sorted({str(path) for path in found} - named)


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
