"""The operator's former module path; import from ``diff_transformer`` or ``diff_transformer.ops`` instead."""

from diff_transformer.ops.api import available_backends, diff_attention, diff_attention_maps

__all__ = ["available_backends", "diff_attention", "diff_attention_maps"]
