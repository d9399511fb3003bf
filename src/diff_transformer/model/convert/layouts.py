"""The layouts by name: one table for the command, for recognising a folder and for the converters.

Every layout's module has ``read_config``, ``write_config``, ``tensors``, ``to_ours`` and ``from_ours``; through this
package's own layout any of them goes to any other. ``DIRECT`` holds conversions that make another model of one.
"""

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

OURS = "diff-transformer"


class Layout(NamedTuple):
    """title: for messages. model_types: ``model_type`` in ``config.json``. writable: whether a model can go to it."""

    title: str
    module: str
    model_types: tuple[str, ...] = ()
    writable: bool = True

    def load(self) -> ModuleType:
        return import_module(f"diff_transformer.model.convert.{self.module}")


LAYOUTS: dict[str, Layout] = {
    OURS: Layout("this package's layout", "ours", ("diff_transformer",)),
    "llama": Layout("a Llama-family softmax model", "llama", ("llama", "mistral")),
    "diffllama": Layout("Hugging Face DiffLlama", "diffllama", ("diffllama",)),
    "authors": Layout("the authors' layout (microsoft/unilm)", "authors"),
    "authors-v2": Layout("the authors' layout of the second version (microsoft/unilm)", "authors_v2"),
    "motif": Layout("Motif-2.6B or Motif-2-12.7B", "motif", ("motif",)),
    "phi4flash": Layout("Phi-4-mini-flash (SambaY)", "phi4flash", ("phi4flash",), writable=False),
}

# (--from, --to): "module:function" below this package, called with the configuration in this package's layout and with
# the options of ``convert_folder``; it returns a ``Conversion`` to another model of that layout.
DIRECT: dict[tuple[str, str], str] = {
    ("llama", "diff"): "from_softmax:to_diff",
    ("llama", "diff_v2"): "from_softmax:to_diff_v2",
    (OURS, "diff"): "from_softmax:to_diff",
    (OURS, "diff_v2"): "from_softmax:to_diff_v2",
}


def direct(origin: str, target: str) -> Callable | None:
    """The function of a conversion that makes another model, or None."""
    place = DIRECT.get((origin, target))
    if place is None:
        return None
    module, function = place.split(":")
    return getattr(import_module(f"diff_transformer.model.convert.{module}"), function)


def targets() -> list[str]:
    """Names that ``--to`` takes."""
    return [name for name, layout in LAYOUTS.items() if layout.writable] + sorted({to for _, to in DIRECT})
