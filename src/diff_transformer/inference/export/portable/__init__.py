"""What stands in an exported model for the parts of this package that are not exported: kernels of its own."""
