"""The table of layouts, and detection of a folder's layout.

Every layout's module has ``read_config``, ``write_config``, ``tensors``, ``to_package`` and ``from_package``. Any
layout converts to any other through this package's own. ``DIRECT`` lists conversions that change the model itself.
"""

import re
from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from diff_transformer.errors import UserError
from diff_transformer.model.convert.checkpoint import Checkpoint
from diff_transformer.model.saved import read_settings

PACKAGE = "diff-transformer"


class Layout(NamedTuple):
    """title: for messages. model_types: ``model_type`` in ``config.json``."""

    title: str
    module: str
    model_types: tuple[str, ...]

    def load(self) -> ModuleType:
        return import_module(f"diff_transformer.model.convert.{self.module}")


LAYOUTS: dict[str, Layout] = {
    PACKAGE: Layout("this package's layout", "package", ("diff_transformer",)),
    "llama": Layout("a Llama-family softmax model", "llama", ("llama", "mistral")),
    "diffllama": Layout("Hugging Face DiffLlama", "diffllama", ("diffllama",)),
    "motif": Layout("Motif-2.6B or Motif-2-12.7B", "motif", ("motif",)),
}

# (--from, --to): "module:function" in this package. The function takes a configuration in this package's layout and the
# options of ``convert_folder``; it returns a ``Conversion`` to another model in this package's layout.
DIRECT: dict[tuple[str, str], str] = {
    ("llama", "diff"): "from_softmax:to_diff",
    ("llama", "diff_v2"): "from_softmax:to_diff_v2",
    (PACKAGE, "diff"): "from_softmax:to_diff",
    (PACKAGE, "diff_v2"): "from_softmax:to_diff_v2",
}


def direct(origin: str, target: str) -> Callable | None:
    """The function of a direct conversion, or None."""
    place = DIRECT.get((origin, target))
    if place is None:
        return None
    module, function = place.split(":")
    return getattr(import_module(f"diff_transformer.model.convert.{module}"), function)


def targets() -> list[str]:
    """Names that ``--to`` takes."""
    return [*LAYOUTS, *sorted({to for _, to in DIRECT})]


# A layout matches if every pattern matches the end of some tensor's name; the first match wins.
_TELLING = (
    ("motif", (r"o_proj\.weight", r"self_attn\.lambda_q1", r"subln\.weight")),
    (PACKAGE, (r"o_proj\.weight", r"self_attn\.core\.\S+")),
    ("diffllama", (r"o_proj\.weight", r"self_attn\.lambda_q1")),
    ("llama", (r"o_proj\.weight", r"gate_proj\.weight", r"input_layernorm\.weight")),
)


def by_names(names: Iterable[str]) -> str | None:
    """Detect the layout from the names of its tensors; None if no layout matches."""
    text = "\n".join(names)
    for layout, patterns in _TELLING:
        if all(re.search(rf"{pattern}$", text, re.MULTILINE) for pattern in patterns):
            return layout
    return None


def layout_of(checkpoint: Checkpoint) -> str:
    """Detect the checkpoint's layout from ``config.json`` and the names of its tensors; return a key of ``LAYOUTS``.

    Raises:
        ValueError: if no layout matches, with the checkpoint's ``model_type`` or some names of its tensors.
    """
    settings = read_settings(checkpoint.folder) or {}
    model_type = settings.get("model_type")
    if settings.get("differential") is not None:
        raise UserError(f"{checkpoint.folder} is a {model_type!r} model made differential in place, where it stays")
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
    raise UserError(f"{checkpoint.folder} is {what}; accepted: {known}")
