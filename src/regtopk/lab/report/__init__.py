"""Figures and pages of recorded runs. Nothing here trains."""

from regtopk.lab.report.page import heading_of, write_report
from regtopk.lab.report.style import columns_of, format_number

__all__ = ["columns_of", "format_number", "heading_of", "write_report"]
