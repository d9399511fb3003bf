"""An OpenAI-compatible endpoint for models of this package, on transformers' own server."""
