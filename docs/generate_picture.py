"""Writes the picture of the two paths with what the lab measured on them.

    python docs/generate_picture.py          write docs/images/paths_measured.svg
    python docs/generate_picture.py --check  exit with 1 if it is not current

The figures are those of docs/evaluation/lab/jct-1p1d.json, which
`dualpath lab bench jct --name jct-1p1d --nodes 1P1D` wrote.
"""

import json
import sys
from pathlib import Path
from statistics import fmean, median
from typing import Any

DOCS = Path(__file__).parent
MEASURED = DOCS / "evaluation" / "lab" / "jct-1p1d.json"
PLAIN = DOCS / "images" / "paths.svg"
PICTURE = DOCS / "images" / "paths_measured.svg"

_PLAIN_HEIGHT, _HEIGHT = 520, 592
_STYLE = """\
    .measured {{ font-weight: 600; fill: {light} }}
"""
_LIGHT, _DARK = "#1a7f37", "#3fb950"


def render() -> str:
    """Return the picture; raises ``ValueError`` if the plain one has changed its form."""
    report = json.loads(MEASURED.read_text(encoding="utf-8"))
    (job,) = report["data"]["jobs"]
    jct_s = {mode: median(run["jct_s"] for run in runs) for mode, runs in job["runs"].items()}
    agents = job["runs"]["basic"][0]["summary"]["sessions"]
    snic = job["lab"]["snic_bytes_per_s"] / 1e6
    gain = jct_s["basic"] / jct_s["dualpath"]
    lines = (
        _text("right", 92, 82, _rates(report, "pe0")),
        _text("right", 370, 82, _rates(report, "de0")),
        _text("", 240, 532, f"{agents} agents done in {jct_s['basic']:.1f} → "
              f"{jct_s['dualpath']:.1f} s: {gain:.2f} times as fast"),
        '  <text class="small" x="240" y="554">Green: Basic → DualPath, MB/s, measured on the lab, '
        "1P1D,</text>\n",
        f'  <text class="small" x="240" y="571">SNICs of {snic:.0f} MB/s, emulated engines, median '
        f"of {len(job['runs']['basic'])}.</text>\n",
    )  # fmt: skip
    svg = PLAIN.read_text(encoding="utf-8")
    svg = _replace(svg, f'viewBox="0 0 480 {_PLAIN_HEIGHT}"', f'viewBox="0 0 480 {_HEIGHT}"')
    svg = _replace(svg, "    .frame {", _STYLE.format(light=_LIGHT) + "    .frame {")
    dark = "      text { fill: #e6edf3 }\n"
    svg = _replace(svg, dark, dark + "  " + _STYLE.format(light=_DARK))
    return _replace(svg, "</svg>", "\n" + "".join(lines) + "</svg>")


def _rates(report: dict[str, Any], node: str) -> str:
    """Return what a node's SNIC read with Basic and with DualPath, MB/s over the run."""
    panels = {panel["title"]: panel for panel in report["panels"]}
    found = []
    for mode in ("basic", "dualpath"):
        series = panels[f"1P1D, {mode}: storage reads"]["series"]
        (points,) = [each["y"] for each in series if each["name"] == node]
        found.append(f"{fmean(points):.0f}")
    return " → ".join(found)


def _text(side: str, x: int, y: int, text: str) -> str:
    return f'  <text class="{f"measured {side}".strip()}" x="{x}" y="{y}">{text}</text>\n'


def _replace(svg: str, old: str, new: str) -> str:
    if svg.count(old) < 1:
        raise ValueError(f"{PLAIN.name} no longer holds {old!r}; adapt generate_picture.py")
    return svg.replace(old, new, 1)


def main() -> int:
    """Write the picture, or check it."""
    picture = render()
    if "--check" in sys.argv[1:]:
        return int(not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture)
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
