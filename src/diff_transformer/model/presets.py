"""Named model configurations: the paper's sizes (appendices C and D) and the small ones of the demo and the tests."""

from diff_transformer.checks import require_known
from diff_transformer.model.config import DiffTransformerConfig

CL100K_VOCABULARY = 100_288  # cl100k_base and its special tokens, padded to a multiple of 128


def _paper(hidden_size: int, layers: int, diff_heads: int, length: int) -> dict:
    return {
        "vocab_size": CL100K_VOCABULARY,
        "hidden_size": hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 2 * diff_heads,
        "max_position_embeddings": length,
        "tie_word_embeddings": True,
    }


PRESETS: dict[str, dict] = {
    "debug": {
        "vocab_size": 512,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": True,
    },
    "demo": {
        "vocab_size": 2048,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "head_norm_init": 0.1,
        "initializer_range": 0.05,
    },
    "830M": _paper(1536, 24, 8, 2048),
    "1.4B": _paper(2048, 24, 8, 2048),
    "2.8B": _paper(2560, 32, 10, 2048),
    "3B": _paper(3072, 28, 12, 4096),
    "6.8B": _paper(4096, 32, 16, 2048),
    "13.1B": _paper(5120, 40, 20, 2048),
}


def preset(name: str, **overrides) -> DiffTransformerConfig:
    """The configuration ``name``; ``overrides`` replace fields.

    Raises:
        UserError: for a name that is not in ``PRESETS``.
    """
    require_known("preset", name, PRESETS)
    return DiffTransformerConfig(**{**PRESETS[name], **overrides})
