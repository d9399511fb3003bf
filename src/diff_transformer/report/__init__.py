"""Results -> one self-contained HTML page: of a comparison, with its claims, or of experiments alone."""

from diff_transformer.report.claims_table import render_claims
from diff_transformer.report.evals_page import write_evals_report
from diff_transformer.report.load import ResultsError, is_comparison, load_results
from diff_transformer.report.write import write_report

__all__ = ["ResultsError", "is_comparison", "load_results", "render_claims", "write_evals_report", "write_report"]
