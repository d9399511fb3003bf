"""The operator: one public function, and one file for each backend that computes it."""

from diff_transformer.ops.diff_attention import available_backends, diff_attention, diff_attention_maps
from diff_transformer.ops.reference import DiffMaps

__all__ = ["DiffMaps", "available_backends", "diff_attention", "diff_attention_maps"]
