"""The look of plots and pages, shared with the reports of ``dualpath replay``."""

from dualpath.laboratory.workload.html_report import PAGE
from dualpath.laboratory.workload.plots import LINE_STYLES, SERIES_COLOURS, STYLE, to_svg

__all__ = ["LINE_STYLES", "PAGE", "SERIES_COLOURS", "STYLE", "to_svg"]
