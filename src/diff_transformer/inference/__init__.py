"""Generating text with a trained model, and taking it to where this package is not installed."""
