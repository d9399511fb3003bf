"""Find the installed package from an exported model."""

from importlib import import_module
from types import ModuleType

from diff_transformer import __version__


def installed(name: str) -> ModuleType | None:
    """The module ``name`` of the package if the version that exported this file is installed, else None."""
    try:
        package = import_module("diff_transformer")
        return import_module(f"diff_transformer.{name}") if package.__version__ == __version__ else None
    except ImportError:
        return None
