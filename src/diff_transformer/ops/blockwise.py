"""The former module path of the backend "blockwise", which checkpoints exported by earlier builds import."""

from diff_transformer.ops.cpu import attend

__all__ = ["attend"]
