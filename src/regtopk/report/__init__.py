"""Figures and pages of recorded runs; nothing here trains."""

from regtopk.report.page import write_report
from regtopk.report.style import columns_of, format_number

__all__ = ["columns_of", "format_number", "write_report"]
