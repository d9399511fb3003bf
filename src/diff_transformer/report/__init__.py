"""Write results as one self-contained HTML page."""

from diff_transformer.report.page import write_report

__all__ = ["write_report"]
