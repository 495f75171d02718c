"""Figures and pages of recorded runs. Nothing here trains."""

from regtopk.lab.report.page import HEADINGS, write_report
from regtopk.lab.report.style import columns_of, format_number

__all__ = ["HEADINGS", "columns_of", "format_number", "write_report"]
