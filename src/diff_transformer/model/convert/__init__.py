"""Convert weights between this package and other implementations; ``docs/conversion.md`` has the table of layouts.

Names are resolved on first use, so rejecting an unknown layout loads no model code.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_HOMES = {
    "LAYOUTS": "layouts",
    "attention_from_unilm": "unilm",
    "convert_folder": "folder",
    "from_diffllama": "diffllama",
    "from_llama": "llama",
    "layout_of": "layouts",
    "softmax_to_diff": "from_softmax",
    "to_diffllama": "diffllama",
    "to_llama": "llama",
}

__all__ = [*_HOMES]

if TYPE_CHECKING:
    from diff_transformer.model.convert.diffllama import from_diffllama as from_diffllama
    from diff_transformer.model.convert.diffllama import to_diffllama as to_diffllama
    from diff_transformer.model.convert.folder import convert_folder as convert_folder
    from diff_transformer.model.convert.from_softmax import softmax_to_diff as softmax_to_diff
    from diff_transformer.model.convert.layouts import LAYOUTS as LAYOUTS
    from diff_transformer.model.convert.layouts import layout_of as layout_of
    from diff_transformer.model.convert.llama import from_llama as from_llama
    from diff_transformer.model.convert.llama import to_llama as to_llama
    from diff_transformer.model.convert.unilm import attention_from_unilm as attention_from_unilm


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
