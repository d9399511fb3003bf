"""Act on a module of another library when it is imported: importing it only for that would take seconds."""

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from types import ModuleType

_ACTIONS: dict[str, list[Callable[[ModuleType], None]]] = {}


class _Finder:
    @staticmethod
    def find_spec(name: str, path=None, target=None):
        spec = PathFinder.find_spec(name, path) if name in _ACTIONS else None
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_act(module: ModuleType) -> None:
                load(module)
                for action in _ACTIONS[name]:
                    action(module)

            spec.loader.exec_module = load_and_act
        return spec


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with the module ``name``, now or when it is imported."""
    if name in sys.modules:
        action(sys.modules[name])
    else:
        _ACTIONS.setdefault(name, []).append(action)


sys.meta_path.insert(0, _Finder)
