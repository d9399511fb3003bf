"""Text of any size to memory-mapped shards of tokens: ``prepare``, and what it is made of."""
