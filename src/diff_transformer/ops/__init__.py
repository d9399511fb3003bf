"""The operator: public functions (api.py, decode.py, varlen.py), and one file or folder for each backend."""

from diff_transformer.ops.api import diff_attention, diff_attention_maps
from diff_transformer.ops.backends import available_backends
from diff_transformer.ops.decode import diff_attention_decode
from diff_transformer.ops.reference import DiffMaps
from diff_transformer.ops.varlen import diff_attention_varlen

__all__ = [
    "DiffMaps",
    "available_backends",
    "diff_attention",
    "diff_attention_decode",
    "diff_attention_maps",
    "diff_attention_varlen",
]
