"""Train the matched pair, run the experiments on both, judge the paper's claims."""

from diff_transformer.compare.run import compare

__all__ = ["compare"]
