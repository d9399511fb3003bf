"""Register the models with transformers' Auto classes lazily: ``import diff_transformer`` imports neither of them.

The Auto classes get a config stub: immediately, or as soon as transformers loads its table of configurations. The first
checkpoint that uses the stub loads ``model.modeling``, which registers the real classes. ``when_imported`` serves other
libraries that are told of this package only if they are used.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MODEL_TYPE = "diff_transformer"
_TABLE = "transformers.models.auto.configuration_auto"


class _Forwarding(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(_configuration(), name)

    def __call__(cls, *args, **kwargs):
        return _configuration()(*args, **kwargs)


class ConfigStub(metaclass=_Forwarding):
    """``DiffTransformerConfig``, loaded on first use."""

    model_type = MODEL_TYPE


class _Finder:
    """Import hook that calls ``action(module)`` once the module is loaded."""

    def __init__(self, module: str, action: Callable[[ModuleType], None]):
        self.module, self.action = module, action

    def find_spec(self, name: str, path=None, target=None):
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module):
            execute(module)
            self.action(module)

        spec.loader.exec_module = execute_and_act
        return spec


def when_imported(module: str, action: Callable[[ModuleType], None]) -> None:
    """Call ``action`` with the module, now or when it is imported."""
    if module in sys.modules:
        action(sys.modules[module])
    else:
        sys.meta_path.insert(0, _Finder(module, action))


def register() -> None:
    """Register the stub, now or when transformers is imported."""
    when_imported(_TABLE, _enter)


def _enter(table: Any) -> None:
    if MODEL_TYPE not in table.CONFIG_MAPPING:
        table.AutoConfig.register(MODEL_TYPE, ConfigStub)


def _configuration():
    return import_module("diff_transformer.model.modeling").DiffTransformerConfig
