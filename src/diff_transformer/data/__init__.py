"""Text, tokens and synthetic tasks, as NumPy arrays that are pure functions of (seed, row)."""
