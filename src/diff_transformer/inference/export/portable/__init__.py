"""Replacements, in an exported model, for the kernels of this package, which are not exported."""
