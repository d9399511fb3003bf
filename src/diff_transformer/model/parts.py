"""Read the attention modules of a decoder of transformers: projections, heads and norms.

Legend: n query heads, m key/value heads, d their width.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from diff_transformer.checks import listed
from diff_transformer.errors import UserError

ENTRY = "differential"  # in the configuration of a model that ``differentiate`` changed
DEX = "dex"  # a submodule of each attention, and the kind
_OUT = ("o_proj", "dense", "out_proj")
_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))


class _Fused(NamedTuple):
    """An attention class with q, k and v in one matrix, its rows by head (q, k and v of head 0, ...) or by part."""

    matrix: str
    out: str
    by_head: bool


FUSED = {
    "Phi3Attention": _Fused("qkv_proj", "o_proj", by_head=False),
    "GPTNeoXAttention": _Fused("query_key_value", "dense", by_head=True),
    "GPT2Attention": _Fused("c_attn", "c_proj", by_head=False),
}
_NUMBERS = {"num_heads", "num_key_value_heads", "num_attention_heads"}


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of a causal LM, in order. Each returns the residual stream after it.

    Raises:
        UserError: for a model without a list of ``config.num_hidden_layers`` layers.
    """
    config = getattr(model, "config", None)
    count = None if config is None else getattr(config.get_text_config(), "num_hidden_layers", None)
    for module in model.modules():
        if isinstance(module, nn.ModuleList) and count and len(module) == count:
            return list(module)
    raise UserError(
        f"{type(model).__name__} has no list of layers as long as its configuration says (num_hidden_layers: {count}); "
        "give a Hugging Face causal LM"
    )


class Parts(NamedTuple):
    """One attention module of a model: its projections, n heads of width d, and norms of queries and keys or None."""

    path: str
    module: Any
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    out: Any
    n: int
    d: int
    norms: tuple[Any, Any]


def read(model: Any) -> list[Parts]:
    """The attention modules of ``model``.

    Raises:
        UserError: for a model whose attention cannot be doubled, saying why.
    """
    if not isinstance(model, PreTrainedModel):
        raise UserError(
            f"the model is a {type(model).__name__}; give a PreTrainedModel of transformers, before it is wrapped "
            "(PEFT adapters come after differentiate)"
        )
    name, config, modules = type(model).__name__, model.config, attentions(model)
    quantised = getattr(model, "hf_quantizer", None) or getattr(config, "quantization_config", None)
    differential = getattr(config, ENTRY, None) is not None or config.model_type == "diffllama"
    for wrong, reason in (
        (config.model_type == "diff_transformer", "is a model of this package; convert_model converts it, for 'dex' "
         "to 'llama' first"),
        (differential, "is differential already; give a softmax model"),
        (quantised is not None, "has quantised weights, which cannot be doubled; load it without quantisation"),
        (getattr(config, "is_encoder_decoder", False), "is an encoder-decoder; only decoders are taken"),
        (config.get_text_config() is not config, "has other parts than text; only text decoders are taken"),
        (not modules, "computes attention without transformers' AttentionInterface, through which its maps would pass"),
    ):  # fmt: skip
        if wrong:
            raise UserError(f"{name} {reason}")
    try:
        return [read_part(path, module) for path, module in modules]
    except UserError as error:
        raise UserError(f"{name} is not taken: {error}") from None


def attentions(model: nn.Module) -> list[tuple[str, Any]]:
    """The modules, by path, that call an attention function of transformers' interface."""
    codes = ((x, getattr(inspect.unwrap(type(x[1]).forward), "__code__", None)) for x in model.named_modules())
    return [named for named, code in codes if code is not None and "get_interface" in code.co_names]


def read_part(path: str, module: Any) -> Parts:
    """The parts of an attention module; the projections of a fused matrix are new.

    Raises:
        UserError: if it cannot be doubled, naming its class.
    """
    kind, fused = type(module).__name__, FUSED.get(type(module).__name__)
    out = next((name for name in _OUT if hasattr(module, name)), _OUT[0])
    names = (fused.matrix, fused.out) if fused else ("q_proj", "k_proj", "v_proj", out)
    missing = [name for name in names if not hasattr(module, name)]
    known = {*names, DEX, *(name for pair in _NORMS for name in pair)}
    children = [name for name, child in module.named_children() if next(child.parameters(), None) is not None]
    unknown = [*module._parameters, *(name for name in children if name not in known)]
    for wrong, reason in (
        (not getattr(module, "is_causal", True), f"{kind} is not causal, as an encoder's attention"),
        (getattr(module, "attn_logit_softcapping", None) is not None,
         f"{kind} caps its scores (attn_logit_softcapping), which the operator does not; set it to None in the "
         "configuration, which changes the logits, and train on"),
        (missing, f"{kind} has no {listed(missing[:1])}"),
        (unknown, f"{kind} has {listed(unknown)} beside its projections"),
    ):  # fmt: skip
        if wrong:
            raise UserError(reason)
    for name in names:
        linear = type(getattr(module, name))
        if linear not in (nn.Linear, Conv1D):
            raise UserError(
                f"{name} of {kind} is a {linear.__module__}.{linear.__name__}; give the model before adapters and "
                "quantisation, or merge them first"
            )
    d = getattr(module, "head_dim", None) or getattr(module, "head_size", 0)
    norms = next((pair for pair in _NORMS if any(hasattr(module, name) for name in pair)), ("", ""))
    if fused:
        q, k, v = _split(getattr(module, fused.matrix), fused.by_head, module.config.num_attention_heads, d)
    else:
        q, k, v = module.q_proj, module.k_proj, module.v_proj
        _check_heads(module, q, k, v, getattr(module, out), d)
    pair = getattr(module, norms[0], None), getattr(module, norms[1], None)
    return Parts(path, module, q, k, v, getattr(module, names[-1]), q.out_features // d, d, pair)


def _check_heads(module: Any, q: nn.Linear, k: nn.Linear, v: nn.Linear, out: nn.Linear, d: int) -> None:
    kind, n, m = type(module).__name__, q.out_features, k.out_features  # widths of all heads
    if not d or n % m or m % d or v.out_features != m or out.in_features != n:
        raise UserError(f"queries, keys and values of {kind} are not heads of one width, or a gate is among them")
    if numbers := _NUMBERS & set(inspect.unwrap(type(module).forward).__code__.co_names):
        raise UserError(f"{kind} fixes its number of heads ({', '.join(sorted(numbers))})")


def _split(matrix: Any, by_head: bool, n: int, d: int) -> list[nn.Linear]:
    """q, k and v of a fused matrix, as copies."""
    weight = matrix.weight.data.T if isinstance(matrix, Conv1D) else matrix.weight.data  # [(n + 2m) d, width]
    rows = torch.arange(len(weight), device="cpu")
    m = (len(weight) // d - n) // 2
    linears = []
    for part in rows.view(n, 3, d).unbind(1) if by_head else rows.split([n * d, m * d, m * d]):
        part = part.flatten().to(weight.device)
        linear = nn.Linear(weight.shape[1], len(part), bias=matrix.bias is not None, device="meta", dtype=weight.dtype)
        linear.weight = nn.Parameter(weight[part], requires_grad=matrix.weight.requires_grad)
        if matrix.bias is not None:
            linear.bias = nn.Parameter(matrix.bias.data[part], requires_grad=matrix.bias.requires_grad)
        linears.append(linear)
    return linears
