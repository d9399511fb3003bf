"""Make a decoder of transformers differential, in place, with the same logits at the start.

    model = differentiate(AutoModelForCausalLM.from_pretrained(...))

The model keeps its class and its code. Each head becomes two, whose maps are both the old map: with lambda = c their
difference is (1 - c) times that map (half of it for "diff_v3"), and W_O is divided by that factor.
``docs/pretrained_to_diff.md`` explains why the copies separate in training. Attention itself runs through transformers'
``AttentionInterface`` under the names ``diff_auto``, ``diff_triton``, ..., and a hook on each attention module computes
lambda.

The entry ``differential`` of the configuration says what was done. ``registration.py`` calls ``restore`` for a model
whose configuration has it, before weights are loaded.

Legend: B batch, T new tokens, S keys, n query heads of the source, m key/value heads, d their width.
"""

import copy
import math
import os
import sys
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, Cache, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from diff_transformer.checks import require_known
from diff_transformer.errors import UserError
from diff_transformer.model import dex
from diff_transformer.model.caches import is_static
from diff_transformer.model.card import source_facts, write_card
from diff_transformer.model.implementations import DEFAULT, IMPLEMENTATIONS, OWN_NAMES
from diff_transformer.model.lambdas import LearnedLambda, TokenLambda
from diff_transformer.model.parts import DEX, ENTRY, FUSED, Parts, attentions, read, read_part
from diff_transformer.ops.api import diff_attention

KINDS = ("diff_v2", "diff_v3", "diff")
FIRST = {"diff_v2": 1.0, "diff_v3": 0.5, "diff": 1.0}  # weight of the first map at the start
LAMBDA = "differential_lambda"  # a submodule of each attention, and the argument that carries its result
GATE = "differential_gate"  # the argument that carries the weight of the first map of "diff_v3"


def differentiate(
    model: Any, kind: str = "diff_v2", lambda_init: float = 0.5, heads: Sequence[Sequence[int]] | None = None
) -> Any:
    """Make ``model`` differential in place; its logits stay what they are, up to the rounding of its dtype.

    Do so before optimizers and PEFT adapters: the projections of queries get new parameters. ``save_pretrained`` and
    ``AutoModelForCausalLM.from_pretrained`` work as before where ``diff_transformer`` is imported first.

    Args:
        model: a ``PreTrainedModel`` that is a decoder, in full or half precision, on any device, also "meta".
        kind: "diff_v2" doubles the queries, and lambda is sigmoid(X W_lambda); keys, values and their cache stay.
            "diff_v3" does so too and also gates the first map; the gates start at 1/2 and 1/4 for every token.
            "diff" doubles queries and keys, and lambda is learned in each layer. "dex" keeps the maps and subtracts
            a learned part of each head's output, which ``fold`` multiplies into W_O after training (``model/dex.py``).
        lambda_init: weight of the second map over that of the first at the start, between 0 and 1; 0.5 for "diff_v2"
            and "diff_v3". Other values than 0.5 round W_O. "dex" has lambda's schedule.
        heads: of each layer the heads that "dex" changes, as of ``heads_by_entropy``; all by default.

    Returns:
        ``model``.

    Raises:
        UserError: for a model whose attention this function cannot read, saying why; it is then unchanged. For an
            unknown kind, or a ``lambda_init`` that gives the second map no gradient.
    """
    check_start(kind, lambda_init)
    if heads is not None and kind != DEX:
        raise UserError(f"heads are for kind {DEX!r}, and kind is {kind!r}, which changes all heads; leave heads out")
    parts, source = read(model), source_facts(model.config._name_or_path)
    shared, own = model.config, copy.deepcopy(model.config)  # a model built from the same configuration stays softmax
    for module in model.modules():
        if vars(module).get("config") is shared:
            module.config = own
    if kind == DEX:
        dex.extend(model, parts, heads)
        setattr(model.config, ENTRY, {"kind": DEX, "source": source})
        return model
    rates = [getattr(part.module, "attention_dropout", getattr(part.module, "attn_dropout", 0)) for part in parts]
    if dropout := max(float(getattr(rate, "p", rate)) for rate in rates):
        warnings.warn(f"attention dropout {dropout:g} is left out: differential attention has none", stacklevel=2)
    setattr(model.config, ENTRY, {"kind": kind, "lambda_init": float(lambda_init), "source": source})
    double(model, parts)
    model.set_attn_implementation(DEFAULT)
    model.add_model_tags(["diff-transformer", "differential-attention"])
    return model


def restore(model: PreTrainedModel, *_: Any, **__: Any) -> None:
    """Give ``model`` the attention that the entry of its configuration describes, where it does not have it yet.

    Raises:
        UserError: for an entry that this version does not know, or as ``differentiate``.
    """
    entry = getattr(model.config, ENTRY)
    if entry["kind"] == DEX:
        return dex.extend(model, [read_part(path, x) for path, x in attentions(model) if not hasattr(x, DEX)])
    check_start(entry["kind"], entry["lambda_init"])
    double(model, [read_part(path, x) for path, x in attentions(model) if not hasattr(x, LAMBDA)])


def check_start(kind: str, lambda_init: Any) -> None:
    """Raise UserError for a kind or a lambda at which a converted model cannot start."""
    require_known("kind of differential attention", kind, (*KINDS, DEX))
    if not isinstance(lambda_init, int | float) or not 0 < lambda_init < 1:
        raise UserError(
            f"lambda_init is {lambda_init!r}; give a number between 0 and 1, neither of them: at 0 the second map has "
            "no gradient, and at 1 nothing is left of two equal maps"
        )
    if kind != "diff" and lambda_init != 0.5:
        raise UserError(
            f"lambda_init is {lambda_init!r}, and {kind!r} has a start of its own; leave it out, or take 'diff'"
        )


def save_card(
    model: PreTrainedModel, save_directory: str | os.PathLike, is_main_process: bool = True, *_: Any, **__: Any
) -> None:
    """Write the model card, ``README.md``, if there is none; ``save_pretrained`` calls it."""
    if is_main_process:
        write_card(model, Path(save_directory))


# Doubling its heads.


@torch.no_grad()
def double(model: PreTrainedModel, parts: Sequence[Parts]) -> None:
    """Double the heads of ``parts`` as the entry of the configuration says, and choose differential attention."""
    config, entry, draw = model.config, getattr(model.config, ENTRY), torch.Generator("cpu").manual_seed(0)
    for part in parts:
        module = part.module
        if type(module).__name__ in FUSED:
            module = SplitAttention(module, part)
            model.set_submodule(part.path, module)
        _double(module, part, entry["kind"], entry["lambda_init"], draw)
    if entry["kind"] == "diff":  # its vectors stay fp32: accelerate makes them units of FSDP, each of one dtype
        model._no_split_modules = {*(model._no_split_modules or ()), LearnedLambda.__name__}
    if not _subtracts(config._attn_implementation):
        config._attn_implementation_internal = DEFAULT
    # saved, so that transformers without this package says in one sentence what it lacks
    config.attn_implementation = DEFAULT


def _double(module: Any, part: Parts, kind: str, lambda_init: float, draw: torch.Generator) -> None:
    """Heads 2i and 2i + 1 of the queries (and of the keys of "diff") become copies of head i."""
    q, k, d, norms = part.q, part.k, part.d, part.norms
    by_head = any(x.numel() > d for x in norms[0].parameters()) if norms[0] is not None else False
    for projection, norm in ((q, norms[0]), (k, norms[1]))[: 2 if kind == "diff" else 1]:
        _widen(projection, d)
        projection.out_features = projection.weight.shape[0]
        if norm is not None and by_head:
            _widen(norm, d)
    part.out.weight.mul_(1 / ((1 - lambda_init) * FIRST[kind]))
    module.add_module(LAMBDA, _lambda(q, kind, lambda_init, part.n, d, draw))
    module.register_forward_pre_hook(_give_lambda, with_kwargs=True)


def _widen(module: Any, d: int) -> None:
    """Double a module's own parameters by heads, in place, so that its hooks stay."""
    for name, old in list(module.named_parameters(recurse=False)):
        rows = d if old.dim() == 1 or isinstance(module, nn.Linear) else 1  # of a head; norms may have [n, d]
        setattr(module, name, nn.Parameter(each_head_twice(old.data, rows), requires_grad=old.requires_grad))


def each_head_twice(weight: Tensor, width: int) -> Tensor:
    """Repeat every head of [heads * width, ...]: heads 2i and 2i + 1 are copies of head i."""
    return weight.unflatten(0, (-1, width)).repeat_interleave(2, dim=0).flatten(0, 1)


def _lambda(q: nn.Linear, kind: str, lambda_init: float, n: int, d: int, draw: torch.Generator) -> nn.Module:
    """The module that computes lambda, beside ``q``. It takes nothing from the global random numbers."""
    device = q.weight.device
    with torch.device("meta"):
        if kind == "diff":
            lam: LearnedLambda | TokenLambda = LearnedLambda(d, lambda_init)
        else:
            second = lambda_init * FIRST[kind]
            columns, offset = 1 + (kind == "diff_v3"), math.log(second / (1 - second))
            lam = TokenLambda(q.in_features, n, columns, offset=offset, telemetry=False)
    if isinstance(lam, TokenLambda):
        lam.to(q.weight.dtype).to_empty(device=device).proj.weight.zero_()
        return lam
    lam.to_empty(device=device)
    vectors = lam.std * torch.randn(2, d, generator=draw, device=draw.device)
    for vector, value in zip(lam.parameters(), (*vectors, *vectors), strict=True):  # q1 = q2, k1 = k2
        vector.copy_(value)
    return lam


class SplitAttention(nn.Module):
    """Attention with q, k and v as matrices of their own, in place of a class that keeps them as one."""

    def __init__(self, fused: Any, part: Parts):
        super().__init__()
        self.config, self.layer_idx = fused.config, fused.layer_idx
        self.scaling, self.head_dim, self.is_causal = fused.scaling, part.d, True
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = part.q, part.k, part.v, part.out
        self.dropout = getattr(fused, "resid_dropout", None) or nn.Identity()
        # None where positions are embedded with the tokens
        self.rotate: Any = getattr(sys.modules[type(fused).__module__], "apply_rotary_pos_emb", None)
        self.train(fused.training)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """``[B, T, width]`` to the same shape; a cache may come under any name."""
        caches = [kwargs.pop(name) for name in list(kwargs) if isinstance(kwargs[name], Cache)]
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (
            projection(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for projection in projections
        )
        if position_embeddings is not None:
            q, k = self.rotate(q, k, *position_embeddings)
        for cache in caches:
            k, v = cache.update(k, v, self.layer_idx)
        function = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, attend)
        out, _ = function(self, q, k, v, attention_mask, scaling=self.scaling, **kwargs)
        return self.dropout(self.o_proj(out.flatten(2))), None


# Attention of a changed model.


def _give_lambda(module: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Forward pre-hook of each attention: add lambda to the arguments that reach ``attend``."""
    implementation = module.config._attn_implementation
    if not _subtracts(implementation):
        raise UserError(
            f"{type(module).__name__} is differential, and attn_implementation={implementation!r} computes softmax "
            f"attention; call model.set_attn_implementation({DEFAULT!r}), or give another of {', '.join(OWN_NAMES)}"
        )
    hidden_states = args[0] if args else kwargs["hidden_states"]
    kind, lam = getattr(module.config, ENTRY)["kind"], getattr(module, LAMBDA)(hidden_states)
    more = dict(zip((GATE, LAMBDA), lam.split(1, 3), strict=True)) if kind == "diff_v3" else {LAMBDA: lam}
    if kind == "diff" and any(map(is_static, kwargs.values())):
        raise UserError("a static cache has as many value heads as key heads; 'diff' needs a dynamic one, or 'diff_v2'")
    return args, {**kwargs, **more}


def _subtracts(name: str | None) -> bool:
    """True if ``attn_implementation=name`` subtracts maps; an engine may have registered one of its own."""
    return str(name).startswith("diff_")


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    is_causal: bool | None = None,
    *,
    backend: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: q ``[B, 2n, T, d]``, k ``[B, m, S, d]`` or of 2m heads, v ``[B, m, S, d]``.

    Raises:
        UserError: from a module that ``differentiate`` has not changed.
    """
    lam = kwargs.get(LAMBDA)
    if lam is None:
        raise UserError(
            f"{type(module).__name__} has softmax attention, which attn_implementation='diff_...' does not compute; "
            "call diff_transformer.differentiate(model) first, or load with attn_implementation='sdpa'"
        )
    T = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = T > 1 and attention_mask is None and causal
    if causal and key.shape[2] > T:  # a static cache, so far empty: the slots beyond T hold nothing
        key, value = key[:, :, :T], value[:, :, :T]
    out = diff_attention(
        *maps_of(query, key, value), value, lam, first=kwargs.get(GATE), attn_mask=attention_mask, is_causal=causal,
        scale=scaling, backend=backend or "auto",
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def maps_of(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q1, q2, k1 and k2 of the arguments of ``attend``."""
    k1, k2 = (key, key) if key.shape[1] == value.shape[1] else (key[:, 0::2], key[:, 1::2])
    return query[:, 0::2], query[:, 1::2], k1, k2


for _name in OWN_NAMES:
    AttentionInterface.register(_name, partial(attend, backend=IMPLEMENTATIONS[_name]))
