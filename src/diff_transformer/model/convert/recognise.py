"""Which layout the checkpoint in a folder has, told from ``config.json`` and from the names of its tensors."""

import re
from collections.abc import Iterable

from diff_transformer.model.convert.checkpoint import Checkpoint, read_settings
from diff_transformer.model.convert.layouts import LAYOUTS, OURS

# The first layout of which every pattern is the end of some tensor's name. Each asks for what the ones above lack.
_TELLING = (
    ("phi4flash", (r"inner_cross_attn\.lambda_q1", r"Wqkv\.weight")),
    ("authors", (r"out_proj\.weight", r"lambda_q1")),
    ("authors-v2", (r"o_proj\.weight", r"lambda_proj\.weight")),
    ("motif", (r"o_proj\.weight", r"self_attn\.lambda_q1", r"subln\.weight")),
    (OURS, (r"o_proj\.weight", r"self_attn\.core\.\S+")),
    ("diffllama", (r"o_proj\.weight", r"self_attn\.lambda_q1")),
    ("llama", (r"o_proj\.weight", r"gate_proj\.weight", r"input_layernorm\.weight")),
)


def by_names(names: Iterable[str]) -> str | None:
    """The layout whose tensors have such names, or None."""
    text = "\n".join(names)
    for layout, patterns in _TELLING:
        if all(re.search(rf"{pattern}$", text, re.MULTILINE) for pattern in patterns):
            return layout
    return None


def layout_of(checkpoint: Checkpoint) -> str:
    """The name of the checkpoint's layout, one of ``LAYOUTS``.

    Raises:
        ValueError: if it has none of them, with what it is: its ``model_type``, or names of its tensors.
    """
    settings = read_settings(checkpoint.folder) or {}
    model_type = settings.get("model_type")
    for name, layout in LAYOUTS.items():
        if model_type is not None and str(model_type).lower() in layout.model_types:
            return name
    told = by_names(checkpoint.shapes())
    if model_type is None and told is not None:
        return told
    known = "; ".join(f"{name} ({layout.title})" for name, layout in LAYOUTS.items())
    if model_type is not None:
        architectures = ", ".join(settings.get("architectures") or [])
        what = f"a {model_type!r} model" + (f" ({architectures})" if architectures else "")
    else:
        some = ", ".join(sorted(checkpoint.shapes())[:4])
        what = f"of no known layout; it has tensors such as {some}"
    raise ValueError(f"{checkpoint.folder} is {what}; accepted: {known}")
