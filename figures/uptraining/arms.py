"""The models that go on from one trained Transformer: itself, DIFF Transformers made of it, and controls."""

import copy

import torch
from torch import Tensor, nn

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.convert import softmax_to_diff
from diff_transformer.model.layers import RMSNorm
from diff_transformer.model.wider import wider

ARMS = {
    "source": "Transformer, continued",
    "wider": "Transformer with new heads, as many parameters as DIFF",
    "diff": "DIFF, copied maps, lambda 1/2",
    "diff_v2": "DIFF V2, copied queries",
    "frozen": "DIFF, lambda and its vectors 0",
    "paired": "DIFF of the same matrices",
    "diff_0.2": "DIFF, copied maps, lambda .2",
    "diff_0.8": "DIFF, copied maps, lambda .8",
    "normed": "DIFF, copied maps, head norm",
}


def arm(name: str, source: DiffTransformerForCausalLM, rows: Tensor) -> DiffTransformerForCausalLM:
    """The model called ``name``. ``rows`` [R, T] of training text: where the head norm reads the size of heads."""
    if name == "source":
        return copy.deepcopy(source)
    if name == "wider":
        return wider(source)
    if name == "frozen":
        return frozen(source)
    if name == "paired":
        return paired(source)
    if name == "normed":
        return normed(source, rows)
    attention, _, lambda_init = name.partition("_0")
    return softmax_to_diff(source, attention, **({"lambda_init": float(f"0{lambda_init}")} if lambda_init else {}))


@torch.no_grad()
def frozen(source: DiffTransformerForCausalLM) -> DiffTransformerForCausalLM:
    """The obvious conversion: a second map that counts nothing. Its gradients, and those of lambda, are 0 for ever."""
    model = softmax_to_diff(source)
    model.config.lambda_init = 0.0
    for new, old in zip(model.model.layers, source.model.layers, strict=True):
        lam = new.self_attn.core.lam
        lam.initial = 0.0
        new.self_attn.o_proj.weight.copy_(old.self_attn.o_proj.weight)
        for vector in lam.parameters():
            vector.zero_()
    return model


@torch.no_grad()
def paired(source: DiffTransformerForCausalLM) -> DiffTransformerForCausalLM:
    """Parameters as before: the same matrices read as half as many differential heads, with values of twice the width.
    Of two heads that become one, the second's map is now subtracted. lambda starts at 1/2, W_O is scaled as in
    ``diff``; what comes out is another function."""
    config = copy.deepcopy(source.config)
    config.attention, config.lambda_init, config.head_norm, config.head_norm_init = "diff", 0.5, False, 1.0
    torch.manual_seed(0)
    model = DiffTransformerForCausalLM(config)
    model.load_state_dict(source.state_dict(), strict=False)
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.mul_(4)
        lam = layer.self_attn.core.lam
        lam.lambda_q2.copy_(lam.lambda_q1)
        lam.lambda_k2.copy_(lam.lambda_k1)
    return model


@torch.no_grad()
def normed(source: DiffTransformerForCausalLM, rows: Tensor) -> DiffTransformerForCausalLM:
    """``diff`` with the paper's head norm. Each head's root mean square over ``rows`` is folded into its columns of
    W_O; by how much the head was larger or smaller at one token is lost."""
    sizes: list[Tensor] = []
    n, d = source.config.heads.outputs, source.config.heads.value_dim
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(
            lambda module, inputs: sizes.append(inputs[0].unflatten(-1, (n, d)).square().mean((0, 1, 3)).sqrt())
        )
        for layer in source.model.layers
    ]
    source(rows)
    for handle in handles:
        handle.remove()
    model = softmax_to_diff(source)
    model.config.head_norm = True
    for new, old, size in zip(model.model.layers, source.model.layers, sizes, strict=True):
        new.self_attn.core.head_norm = RMSNorm(d, model.config.rms_norm_eps)
        gain = 1.0 - new.self_attn.core.lam.initial
        new.self_attn.o_proj.weight.copy_(old.self_attn.o_proj.weight * size.repeat_interleave(d) / gain)
    return model


def gradient_norms(model: nn.Module, rows: Tensor) -> dict[str, float]:
    """Root mean square of the gradient of the mean loss over ``rows``, by part, all layers together."""
    model.zero_grad()
    model(rows, labels=rows).loss.backward()
    found: dict[str, list[Tensor]] = {}
    for layer in model.model.layers:
        attention, d = layer.self_attn, model.config.head_dim
        for name, weight in (("q", attention.q_proj.weight), ("k", attention.k_proj.weight)):
            by_head = weight.grad.unflatten(0, (-1, d))
            pairs = attention.heads.queries if name == "q" else attention.heads.keys
            paired = model.config.attention != "softmax" and pairs > attention.heads.values
            for part, heads in (
                ((f"{name}1", by_head[0::2]), (f"{name}2", by_head[1::2])) if paired else ((name, by_head),)
            ):
                found.setdefault(part, []).append(heads.flatten())
        for name, parameter in attention.core.named_parameters():
            if "lam" in name:
                found.setdefault("lambda", []).append(parameter.grad.flatten())
    model.zero_grad()
    return {name: float(torch.cat(parts).square().mean().sqrt()) for name, parts in found.items()}


@torch.no_grad()
def distance(model: nn.Module, source: nn.Module, rows: Tensor, dtype: torch.dtype) -> dict[str, float]:
    """How far the logits and next-token distributions of ``model`` in ``dtype`` are from those of ``source`` in fp64.

    ``source_logits``: the same distance of the source itself in ``dtype``, the measure of what rounding alone does.
    """
    exact = copy.deepcopy(source).double()(rows).logits
    logits = copy.deepcopy(model).to(dtype)(rows).logits.double()
    own = copy.deepcopy(source).to(dtype)(rows).logits.double()
    p = exact.log_softmax(-1)
    return {
        "logits": float((logits - exact).abs().max()),
        "source_logits": float((own - exact).abs().max()),
        "largest_logit": float(exact.abs().max()),
        "kl": float((p.exp() * (p - logits.log_softmax(-1))).sum(-1).mean()),
    }
