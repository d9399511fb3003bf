"""Differential attention (arXiv 2410.05258): the operator, the model, its matched Transformer, and the experiments.

Names are resolved on first use, so that ``import diff_transformer`` loads neither torch nor transformers.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from diff_transformer.model import registration as _registration  # noqa: F401

__version__ = "0.1.0"

_HOMES = {
    "diff_attention": "ops.api",
    "diff_attention_maps": "ops.api",
    "diff_attention_decode": "ops.decode",
    "diff_attention_varlen": "ops.varlen",
    "available_backends": "ops.backends",
    "DiffMaps": "ops.reference",
    "lambda_init": "model.lambdas",
    "DiffAttention": "model.attention",
    "DiffTransformerConfig": "model.modeling",  # beside the models, which it registers with transformers
    "matched_baseline": "model.config",
    "differentiate": "model.differentiate",
    "fold": "model.dex",
    "DiffTransformerModel": "model.modeling",
    "DiffTransformerForCausalLM": "model.modeling",
    "convert_folder": "model.convert.folder",
    "compare": "lab.compare",
    "run_eval": "lab.evaluate",
    "load_records": "lab.record",
    "Record": "lab.record",
}

__all__ = ["__version__", *_HOMES]

if TYPE_CHECKING:
    from diff_transformer.lab.compare import compare as compare
    from diff_transformer.lab.evaluate import run_eval as run_eval
    from diff_transformer.lab.record import Record as Record
    from diff_transformer.lab.record import load_records as load_records
    from diff_transformer.model.attention import DiffAttention as DiffAttention
    from diff_transformer.model.config import DiffTransformerConfig as DiffTransformerConfig
    from diff_transformer.model.config import matched_baseline as matched_baseline
    from diff_transformer.model.convert.folder import convert_folder as convert_folder
    from diff_transformer.model.dex import fold as fold
    from diff_transformer.model.differentiate import differentiate as differentiate
    from diff_transformer.model.lambdas import lambda_init as lambda_init
    from diff_transformer.model.modeling import DiffTransformerForCausalLM as DiffTransformerForCausalLM
    from diff_transformer.model.modeling import DiffTransformerModel as DiffTransformerModel
    from diff_transformer.ops.api import diff_attention as diff_attention
    from diff_transformer.ops.api import diff_attention_maps as diff_attention_maps
    from diff_transformer.ops.backends import available_backends as available_backends
    from diff_transformer.ops.decode import diff_attention_decode as diff_attention_decode
    from diff_transformer.ops.reference import DiffMaps as DiffMaps
    from diff_transformer.ops.varlen import diff_attention_varlen as diff_attention_varlen


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(
            f"module 'diff_transformer' has no attribute {name!r}; it has {', '.join(sorted(__all__))}"
        )
    value = getattr(import_module(f"diff_transformer.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted(__all__)
