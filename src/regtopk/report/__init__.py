"""Figures and pages of recorded runs; nothing here trains."""

from regtopk.report.page import write_report
from regtopk.report.style import METHOD_LABELS, format_number

__all__ = ["METHOD_LABELS", "format_number", "write_report"]
