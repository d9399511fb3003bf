"""Register the models with transformers' Auto classes lazily: ``import diff_transformer`` imports neither of them.

The Auto classes get a config stub: immediately, or as soon as transformers loads its table of configurations. The first
checkpoint that uses the stub loads ``model.modeling``, which registers the real classes.
"""

import sys
from importlib import import_module
from importlib.util import find_spec

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
    """Import hook that registers the stub when transformers' table of configurations is loaded."""

    def find_spec(self, name: str, path=None, target=None):
        if name != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_enter(module):
            execute(module)
            _enter(module)

        spec.loader.exec_module = execute_and_enter
        return spec


def register() -> None:
    """Register the stub, now or when transformers is imported."""
    if _TABLE in sys.modules:
        _enter(sys.modules[_TABLE])
    else:
        sys.meta_path.insert(0, _Finder())


def _enter(table) -> None:
    if MODEL_TYPE not in table.CONFIG_MAPPING:
        table.AutoConfig.register(MODEL_TYPE, ConfigStub)


def _configuration():
    return import_module("diff_transformer.model.modeling").DiffTransformerConfig
