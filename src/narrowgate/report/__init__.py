"""Reports: runs as one HTML page that needs nothing else."""

from narrowgate.report.data import ReportError
from narrowgate.report.page import write_report

__all__ = ["ReportError", "write_report"]
