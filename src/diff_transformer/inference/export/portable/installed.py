"""The package itself, where an exported model finds it installed."""

from importlib import import_module
from types import ModuleType

from diff_transformer import __version__


def installed(name: str) -> ModuleType | None:
    """The module ``name`` of the package, if the very version is installed that exported this file; else None."""
    try:
        package = import_module("diff_transformer")
        return import_module(f"diff_transformer.{name}") if package.__version__ == __version__ else None
    except ImportError:
        return None
