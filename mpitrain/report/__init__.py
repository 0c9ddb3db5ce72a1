"""One HTML file of a run."""

from mpitrain.report.page import write_report

__all__ = ["write_report"]
