"""Register the models when transformers is imported.

A model that ``differentiate`` changed keeps its class, and transformers has no hook between building a model and
loading its weights. So three methods of ``PreTrainedModel`` begin with one more step, for such models alone.
"""

import sys
from functools import wraps

from diff_transformer.importing import when_imported


def _register_config(table) -> None:
    table.CONFIG_MAPPING._mapping["diff_transformer"] = "DiffTransformerConfig"
    table.CONFIG_MAPPING._modules["diff_transformer"] = sys.modules["diff_transformer"]  # which loads it on first use


def _extend_models(models) -> None:
    for name, step in {"__init__": None, "post_init": "restore", "save_pretrained": "save_card"}.items():
        setattr(models.PreTrainedModel, name, _extended(getattr(models.PreTrainedModel, name), step))


def _extended(method, step: str | None):
    @wraps(method)
    def extended(self, *args, **kwargs):
        if getattr(getattr(self, "config", args[0] if args else None), "differential", None) is not None:
            from diff_transformer.model import differentiate  # which registers names of attn_implementation

            if step is not None:
                getattr(differentiate, step)(self, *args, **kwargs)
        return method(self, *args, **kwargs)

    return extended


when_imported("transformers.models.auto.configuration_auto", _register_config)
when_imported("transformers.modeling_utils", _extend_models)
