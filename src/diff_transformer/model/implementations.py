"""The meaning of transformers' ``attn_implementation``: the backend of differential attention.

``from_pretrained(folder, attn_implementation=NAME)`` and ``model.set_attn_implementation(NAME)`` accept the names of
``IMPLEMENTATIONS``. Without one, ``config.backend`` determines the backend. Softmax attention is always PyTorch's.
"""

from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from diff_transformer.ops.backends import BACKENDS

DEFAULT = "diff_auto"
IMPLEMENTATIONS: dict[str, str | None] = {
    DEFAULT: None,  # ``config.backend``
    "eager": "reference",
    "sdpa": "sdpa",
    **{f"diff_{name}": name for name in BACKENDS},
}
OWN_NAMES = tuple(name for name in IMPLEMENTATIONS if name.startswith("diff_"))
for _name in OWN_NAMES:
    AttentionMaskInterface.register(_name, sdpa_mask)


def attention_backend(config) -> str:
    """The backend of ``diff_attention`` in a model of ``config``."""
    return IMPLEMENTATIONS[config._attn_implementation or DEFAULT] or config.backend
