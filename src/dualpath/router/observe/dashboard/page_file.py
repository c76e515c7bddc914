"""The page: one HTML document of the package's parts, and the policy it is served under.

Style and script stand inside, so that a saved copy opens files without a router; the Content
Security Policy names their hashes and allows nothing else but requests to the page's own origin.
"""

import base64
import functools
import hashlib
from importlib.resources import files

import msgspec

#: Joined in this order into one module: a part uses what stands before it.
SCRIPTS = (
    "dom.js",
    "format.js",
    "picture.js",
    "chart.js",
    "sections.js",
    "live.js",
    "replay.js",
    "simulation.js",
    "key.js",
    "main.js",
)


class DashboardPage(msgspec.Struct, frozen=True):
    """``body`` in UTF-8 and the headers to serve it with, content type included."""

    body: bytes
    headers: dict[str, str]


@functools.cache
def dashboard_page() -> DashboardPage:
    """Return the page; it does not depend on the router that serves it."""
    folder = files(__package__) / "page"
    style = folder.joinpath("page.css").read_text("utf-8")
    script = "".join(folder.joinpath(name).read_text("utf-8") for name in SCRIPTS)
    html = folder.joinpath("page.html").read_text("utf-8")
    body = html.replace("/*style*/", style).replace("/*script*/", script)
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_source_hash(style)}'",
            f"script-src '{_source_hash(script)}'",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return DashboardPage(body.encode(), headers)


def _source_hash(text: str) -> str:
    """Return a CSP hash source; browsers hash what stands between the tags, to the byte."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
