"""Generate text with a trained model, and export it to machines without this package."""
