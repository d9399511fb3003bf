"""Results of a comparison -> one self-contained HTML page, and the table of claims for a terminal."""

from diff_transformer.report.claims_table import render_claims
from diff_transformer.report.load import ResultsError, load_results
from diff_transformer.report.write import write_report

__all__ = ["ResultsError", "load_results", "render_claims", "write_report"]
