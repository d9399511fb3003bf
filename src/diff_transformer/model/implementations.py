"""The meaning of transformers' ``attn_implementation``: one name selects differential and softmax backends.

``from_pretrained(folder, attn_implementation=NAME)`` and ``model.set_attn_implementation(NAME)`` accept the names of
``IMPLEMENTATIONS``. Without one, ``config.backend`` determines the backend of differential attention.
"""

from typing import NamedTuple

from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from diff_transformer.checks import require_known
from diff_transformer.model.heads import CORES
from diff_transformer.ops.backends import BACKENDS

DEFAULT = "diff_auto"


class Implementation(NamedTuple):
    """diff: backend of ``diff_attention``, None for ``config.backend``; softmax: one of ``softmax_attention``."""

    diff: str | None
    softmax: str


IMPLEMENTATIONS = {
    DEFAULT: Implementation(None, "sdpa"),
    "eager": Implementation("reference", "eager"),
    "sdpa": Implementation("sdpa", "sdpa"),
    **{f"diff_{name}": Implementation(name, "sdpa") for name in BACKENDS},
}
OWN_NAMES = tuple(name for name in IMPLEMENTATIONS if name.startswith("diff_"))
for _name in OWN_NAMES:
    AttentionMaskInterface.register(_name, sdpa_mask)


def check_implementation(name: str | None) -> str:
    """The name that the configuration keeps; None means the default.

    Raises:
        UserError: for a name that is not in ``IMPLEMENTATIONS``.
    """
    require_known("attn_implementation", DEFAULT if name is None else name, IMPLEMENTATIONS)
    return DEFAULT if name is None else name


def attention_backend(config) -> str:
    """The backend of a model of ``config``: of ``diff_attention``, or of ``softmax_attention``."""
    chosen = IMPLEMENTATIONS[config._attn_implementation or DEFAULT]
    if CORES[config.attention].maps == 1:
        return chosen.softmax
    return config.backend if chosen.diff is None else chosen.diff
