"""Register the models with transformers lazily: ``import diff_transformer`` imports neither of them.

The Auto classes get a config stub as soon as transformers loads its table of configurations. The first checkpoint that
uses the stub loads ``model.modeling``, which registers the real classes. A model of transformers that ``differentiate``
changed keeps its class, for which transformers has no hook; so three methods of ``PreTrainedModel`` get one more step,
for configurations with the entry ``differential`` alone.
"""

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MODEL_TYPE = "diff_transformer"
_DIFFERENTIATE = "diff_transformer.model.differentiate"


class _Forwarding(type):
    def __getattr__(cls, name: str):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_module("diff_transformer.model.modeling").DiffTransformerConfig, name)

    def __call__(cls, *args, **kwargs):
        return import_module("diff_transformer.model.modeling").DiffTransformerConfig(*args, **kwargs)


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
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
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
    """Register the stub, and the steps of differential models, now or when transformers is imported."""
    when_imported("transformers.models.auto.configuration_auto", _register_stub)
    when_imported("transformers.modeling_utils", _extend_models)


def _register_stub(table: Any) -> None:
    if MODEL_TYPE not in table.CONFIG_MAPPING:
        table.AutoConfig.register(MODEL_TYPE, ConfigStub)


def _extend_models(models: Any) -> None:
    """Register the names of ``attn_implementation`` first, restore attention before weights load, write a card."""

    def step(method: str, before: str = "", after: str = "") -> None:
        original = getattr(models.PreTrainedModel, method)

        @wraps(original)
        def extended(self, *args, **kwargs):
            config = getattr(self, "config", args[0] if args else None)
            code = import_module(_DIFFERENTIATE) if getattr(config, "differential", None) is not None else None
            if code and before:
                getattr(code, before)(self)
            original(self, *args, **kwargs)
            if code and after:
                getattr(code, after)(self, *args)

        setattr(models.PreTrainedModel, method, extended)

    step("__init__")
    step("post_init", before="restore")
    step("save_pretrained", after="save_card")
