"""The look of plots and pages, shared with the reports of ``dualpath replay``."""

from dualpath.workload.html_report import PAGE
from dualpath.workload.plots import LINE_STYLES, SERIES_COLOURS, STYLE, to_svg

__all__ = ["LINE_STYLES", "PAGE", "SERIES_COLOURS", "STYLE", "to_svg"]
