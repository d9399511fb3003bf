"""Register the models with transformers' Auto classes lazily: ``import diff_transformer`` imports neither of them.

The Auto classes get a config stub: immediately, or as soon as transformers loads its table of configurations. The first
checkpoint that uses the stub loads ``model.modeling``, which registers the real classes. A model of transformers that
``differentiate`` made differential keeps its class: ``PreTrainedModel.post_init`` gets one more step, which restores
the attention if the configuration has the entry ``differential``. ``when_imported`` serves other libraries that are
told of this package only if they are used.
"""

import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

MODEL_TYPE = "diff_transformer"
_TABLE = "transformers.models.auto.configuration_auto"
_MODELS = "transformers.modeling_utils"
_DIFFERENTIATE = "diff_transformer.model.differentiate"


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
    """Register the stub, and the step that restores differential models, now or when transformers is imported."""
    when_imported(_TABLE, _enter)
    when_imported(_MODELS, _restore_differential)


def _enter(table: Any) -> None:
    if MODEL_TYPE not in table.CONFIG_MAPPING:
        table.AutoConfig.register(MODEL_TYPE, ConfigStub)


def _configuration():
    return import_module("diff_transformer.model.modeling").DiffTransformerConfig


def _restore_differential(models: Any) -> None:
    init, post_init = models.PreTrainedModel.__init__, models.PreTrainedModel.post_init

    @wraps(init)
    def knowing(self, config, *args, **kwargs):
        if getattr(config, "differential", None) is not None:
            import_module(_DIFFERENTIATE)  # registers the names of attn_implementation, which are checked next
        init(self, config, *args, **kwargs)

    @wraps(post_init)
    def restoring(self):
        if getattr(self.config, "differential", None) is not None:
            import_module(_DIFFERENTIATE).restore(self)
        post_init(self)

    models.PreTrainedModel.__init__, models.PreTrainedModel.post_init = knowing, restoring
