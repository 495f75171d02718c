"""Figures and pages of recorded runs; nothing here trains."""

from regtopk.report.page import write_report
from regtopk.report.style import format_number

__all__ = ["format_number", "write_report"]
