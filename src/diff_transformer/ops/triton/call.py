"""The former module path of the record of a call."""

from diff_transformer.ops.call import Call, Documents

__all__ = ["Call", "Documents"]
