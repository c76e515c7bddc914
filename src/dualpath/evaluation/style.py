"""The look of plots and pages, shared with the reports of ``dualpath replay``."""

from dualpath.workload.html_report import _PAGE as PAGE
from dualpath.workload.plots import _LINE_STYLES as LINE_STYLES
from dualpath.workload.plots import _STYLE as STYLE
from dualpath.workload.plots import SERIES_COLOURS, to_svg

__all__ = ["LINE_STYLES", "PAGE", "SERIES_COLOURS", "STYLE", "to_svg"]
