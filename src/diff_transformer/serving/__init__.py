"""An OpenAI-compatible endpoint: vLLM with this package's plugin, or transformers' own server."""
