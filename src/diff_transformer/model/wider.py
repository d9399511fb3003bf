"""A softmax Transformer with more heads and the same logits: the control of a conversion to DIFF."""

import copy
from typing import Any

import torch
from torch import Tensor

from diff_transformer.checks import first_line
from diff_transformer.errors import UserError

_HEADS = {  # ends of names -> which dimension has the heads, and whether they are those of queries
    **{f"{name}_proj.{kind}": (0, name == "q") for name in "qkv" for kind in ("weight", "bias")},
    **{f"{name}.weight": (1, True) for name in ("o_proj", "dense", "out_proj")},
}


@torch.no_grad()
def wider(model: Any, seed: int = 0) -> Any:
    """A copy of ``model`` with more heads, drawn anew, whose columns of W_O are 0: the logits stay.

    It has as many parameters more as the conversion to ``"diff"``, as nearly as whole groups of heads allow.

    Args:
        model: a softmax Transformer of this package or of transformers, with separate projections.

    Raises:
        UserError: for a model whose projections this function cannot read, naming the first.
    """
    config, name = copy.deepcopy(model.config), type(model).__name__
    n, m = config.num_attention_heads, getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // n
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = *wider_heads(n, m), width
    with torch.random.fork_rng(devices=[]), model.device:  # also on the meta device
        torch.manual_seed(seed)
        try:
            control = type(model)(config)
        except ValueError as error:
            raise UserError(f"{name} cannot get more heads: {first_line(error)}") from None
    for parameter in control.parameters():  # control.to() would round the frequencies of the rotary embedding too
        parameter.data = parameter.data.to(model.dtype)
    if control.num_parameters() == model.num_parameters():
        raise UserError(f"{name} cannot get more heads: its configuration does not say how wide they are")
    for key, parameter in control.named_parameters():
        old = model.get_parameter(key)
        if old.shape == parameter.shape:
            parameter.copy_(old)
            continue
        place = next((at for end, at in _HEADS.items() if key.endswith(f".{end}")), None)
        if place is None:
            raise UserError(f"{name} cannot get more heads: {key} spans several of them")
        dimension, of_queries = place
        places = _places(n, m, config.num_attention_heads // config.num_key_value_heads, of_queries)
        if dimension:
            parameter.zero_()
        each = old.shape[dimension] // len(places)
        rows = (each * places[:, None] + torch.arange(each)).flatten().to(parameter.device)
        parameter.index_copy_(dimension, rows, old)
    control.generation_config = copy.deepcopy(model.generation_config)
    return control.eval()


def wider_heads(n: int, m: int) -> tuple[int, int]:
    """Query and key/value heads with which W_Q, W_K, W_V and W_O grow by as much as W_Q and W_K of n and m heads are,
    or the nearest to it."""
    choices = [(m * group + more * group, m + more) for more in range(m + 1) for group in range(n // m, 2 * n // m + 2)]
    return min(choices, key=lambda new: (abs(2 * (new[0] - n + new[1] - m) - (n + m)), -new[1], -new[0]))


def _places(n: int, m: int, group: int, of_queries: bool) -> Tensor:
    """The places of the old heads among the new ones, whose groups have ``group`` queries each."""
    if not of_queries:
        return torch.arange(m)
    old = torch.arange(n)
    return old // (n // m) * group + old % (n // m)
