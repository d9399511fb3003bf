"""Write results as one self-contained HTML page: a comparison, or experiments alone."""

from diff_transformer.report.claims import render_claims
from diff_transformer.report.evals_page import write_evals_report
from diff_transformer.report.load import ResultsError, is_comparison, load_results
from diff_transformer.report.page import write_report

__all__ = ["ResultsError", "is_comparison", "load_results", "render_claims", "write_evals_report", "write_report"]
