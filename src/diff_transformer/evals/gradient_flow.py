"""Gradient flow (appendix F): the sizes of the gradients of attention's weights in a model.

The appendix derives the gradients of W_Q, W_K, W_V and W_O. It concludes that they equal those of softmax attention up
to constants, so that a Transformer's hyperparameters carry over. This experiment measures the sizes by layer and kind
of weight, in the model as given and in the pair of its configuration at initialisation: DIFF and Transformer with equal
shared weights. A test of this file checks the appendix's closed forms against automatic differentiation.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diff_transformer.errors import UserError
from diff_transformer.evals.lm import CausalLM, text_details, text_rows
from diff_transformer.evals.samples import ALL, Samples
from diff_transformer.evals.types import Result
from diff_transformer.model.parts import layers_of
from diff_transformer.settings import PositiveInt, Seed

# The part that a module in an attention layer computes, by the names that Hugging Face models use.
_PARTS = {
    "q_proj": "q", "k_proj": "k", "v_proj": "v", "qkv_proj": "qkv", "query_key_value": "qkv", "c_attn": "qkv",
    "o_proj": "o", "out_proj": "o", "dense": "o", "c_proj": "o",
}  # fmt: skip
_OWN = {"lambda": (".lambda_", ".lam.proj."), "head_norm": (".head_norm",)}  # parts in names of parameters


@dataclass(frozen=True)
class Settings:
    """Gradient flow."""

    # "python", a text file, JSON lines, parquet or a folder.
    corpus: str = "python"
    # Text to use: "held-out" (of a folder, a tenth), "all", or "auto": held-out for models of this package; for other
    # models held-out if that suffices, else all
    split: str = "auto"
    # Tokens in a row.
    length: PositiveInt = 2048
    # Rows.
    samples: PositiveInt = 32
    # Rows per backward pass; gradient sizes are those of such a batch.
    batch_size: PositiveInt = 4
    # Seed of the rows and of the pair's weights.
    seed: Seed = 0


QUICK: dict = {"length": 128, "samples": 16}


def amount(settings: Settings, config: Any) -> tuple[int, int]:
    """Rows of all states, and their tokens."""
    rows = len(_states(config)) * settings.samples
    return rows, rows * settings.length


def run(lm: CausalLM, settings: Settings, samples: Samples) -> Result:
    """Gradient flow with ``settings``."""
    ids, part = text_rows(lm, settings, settings.samples)
    result = evaluate_gradient_flow(lm, ids, settings, samples)
    result.about.update(text_details(settings, part))
    return result


def evaluate_gradient_flow(
    lm: CausalLM,
    ids: Tensor,
    settings: Settings = Settings(),
    samples: Samples = ALL,
) -> Result:
    """The root mean square of the loss's gradient over the entries of each weight.

    Args:
        ids: text for the loss, int64 ``[rows, T]``.
        settings: without those of the text.

    Returns:
        A row for each batch, state, part and layer with its ``rms``. State is "model" (as given), "init_diff" or
        "init_softmax" (the pair at initialisation, for models of this package whose heads form pairs); part q1, q2, k1,
        k2 (halves of W_Q and W_K), q, k, v, qkv, o, lambda, head_norm, as far as the model has them.

    Raises:
        ValueError: for a model whose attention weights are not found, with the names that are supported.
    """
    batch_size, seed = settings.batch_size, settings.seed
    rows: list[dict] = []
    for state, attention in _states(lm.model.config).items():
        model = lm.model if attention is None else _at_init(lm, attention, seed)
        sizes = partial(gradient_sizes, model, attention_weights(model))
        measured = samples.rows(
            state, [*ids], lambda batch, of=sizes: [of(torch.stack([*batch]))], batch_size=batch_size
        )
        rows += [
            {"example": batch, "state": state, "part": part, "layer": layer, "rms": rms, "loss": of["loss"]}
            for batch, of in enumerate(measured)
            for part, layer, rms in of["rms"]
        ]
    return Result("gradient_flow", rows, {"tokens": ids.numel(), "length": ids.shape[1]})


@dataclass(frozen=True)
class Weight:
    """A weight, or the ``heads`` of it, each ``head_dim`` rows."""

    parameter: nn.Parameter
    heads: tuple[int, ...] | None = None
    head_dim: int = 1

    def of(self, gradient: Tensor) -> Tensor:
        """The entries of this part in the weight's gradient, fp64."""
        if self.heads is not None:
            gradient = gradient.unflatten(0, (-1, self.head_dim))[list(self.heads)]
        return gradient.double().flatten()


def attention_weights(model: nn.Module) -> list[dict[str, list[Weight]]]:
    """For each layer, the weights of its attention by part; none for a layer of a hybrid that has no attention.

    Raises:
        UserError: if no layer has any.
    """
    layers = [_layer_weights(layer) for layer in layers_of(model)]
    if not any(layers):
        raise UserError(f"{type(model).__name__} has no weights of attention called {', '.join(_PARTS)}")
    return layers


def _layer_weights(layer: nn.Module) -> dict[str, list[Weight]]:
    from diff_transformer.model.attention import Attention

    parts: dict[str, list[Weight]] = {}
    for name, parameter in layer.named_parameters():
        *path, module, kind = f".{name}".split(".")
        in_attention = any("attn" in each or "attention" in each for each in path)
        part = _PARTS.get(module) if in_attention and kind == "weight" else None
        part = part or next((of for of, marks in _OWN.items() if any(mark in f".{name}" for mark in marks)), None)
        if part is not None:
            parts.setdefault(part, []).append(Weight(parameter))
    for module in layer.modules():
        if isinstance(module, Attention) and module.core.variant.maps == 2:
            for part, heads in _heads_of_maps(module.core, module.heads).items():
                parts[part] = [Weight(parts[part[0]][0].parameter, tuple(heads), module.head_dim)]
    return parts


def _heads_of_maps(core: Any, heads: Any) -> dict[str, list[int]]:
    """The heads of W_Q and W_K that make the first and the second map; shared keys belong to neither."""
    group = core.variant.signal_heads + 1
    queries = range(heads.queries)
    parts = {"q1": [i for i in queries if i % group < group - 1], "q2": [i for i in queries if i % group == group - 1]}
    if core.variant.shared_keys:
        return parts
    return parts | {"k1": list(range(0, heads.keys, 2)), "k2": list(range(1, heads.keys, 2))}


def gradient_sizes(model: nn.Module, weights: Sequence[dict[str, list[Weight]]], ids: Tensor) -> dict:
    """Root mean square of the gradient of the mean loss over ``ids [B, T]``: its ``loss``, and as ``rms``
    a list of (kind, layer, size).

    The model's own ``.grad`` fields stay unchanged; dropout is off.
    """
    device = next(model.parameters()).device
    parameters = list({id(w.parameter): w.parameter for layer in weights for ws in layer.values() for w in ws}.values())
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            logits = model(input_ids=ids.to(device), use_cache=False).logits[:, :-1].float()
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].to(device).flatten())
            gradients = torch.autograd.grad(loss, parameters)
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)
    by_id = {id(parameter): gradient for parameter, gradient in zip(parameters, gradients, strict=True)}
    sizes = []
    for number, layer in enumerate(weights):
        for kind, parts in layer.items():
            values = torch.cat([part.of(by_id[id(part.parameter)]) for part in parts])
            sizes.append((kind, number, values.square().mean().sqrt().item()))
    return {"loss": loss.item(), "rms": sizes}


def _states(config: Any) -> dict[str, str | None]:
    """The states that are measured, each with the attention of its new model; None is the model as given.

    A model of this package is of a pair, unless it is a Transformer with an odd number of heads.
    """
    of_pair = getattr(config, "model_type", "") == "diff_transformer" and (
        config.attention != "softmax" or not (config.num_attention_heads % 2 or config.num_key_value_heads % 2)
    )
    return {"model": None} | ({"init_diff": "diff", "init_softmax": "softmax"} if of_pair else {})


def _at_init(lm: CausalLM, attention: str, seed: int) -> nn.Module:
    """One model of the pair of ``lm``'s configuration at initialisation; both have equal shared weights.

    ``"diff"`` means the model's own variant of differential attention, if it has one.
    """
    from diff_transformer.model.config import matched_baseline
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    own = copy.deepcopy(lm.model.config)
    own.softmax_head_norm = False
    if own.attention == "softmax":
        own.attention = "diff"
    torch.manual_seed(seed)
    model = DiffTransformerForCausalLM(matched_baseline(own))
    if attention == "diff":
        shared = model.state_dict()
        model = DiffTransformerForCausalLM(own)
        shapes = {name: value.shape for name, value in model.state_dict().items()}
        model.load_state_dict({n: v for n, v in shared.items() if shapes.get(n) == v.shape}, strict=False)
    return model.to(lm.device).eval()
