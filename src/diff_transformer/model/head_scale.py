"""The initial scale of the heads: their size before training, made equal to that of the matched Transformer.

Softmax attention over t nearly independent values of size s gives about s / sqrt(t): small, and smaller with length.
The head norm gives 1 - lambda_init (0.8 in the first layer) for any width, length and initial weights.
"""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def head_outputs(config, input_ids: Tensor, seed: int = 0, targets: list[float] | None = None) -> list[float]:
    """Root mean square of W_O's input in each layer of an untrained model of ``config``, on tokens ``[B, T]``.

    With ``targets``, one for each layer, W_O's input is scaled to them, so that later layers see it as in a model whose
    scale is matched.
    """
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DiffTransformerForCausalLM(config).eval()
    sizes: list[float] = []

    def measure(_: nn.Module, inputs: tuple[Tensor]):
        sizes.append(inputs[0].float().square().mean().sqrt().item())
        return None if targets is None else (inputs[0] * (targets[len(sizes) - 1] / sizes[-1]),)

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(measure)
    with torch.no_grad():
        model(input_ids, use_cache=False)
    return sizes


def with_matched_scale(config, input_ids: Tensor | None = None, *, length: int = 128, seed: int = 0, draws: int = 4):
    """A copy of ``config`` whose heads start, in each layer, with the RMS that they have in the matched Transformer.

    It sets ``head_norm_init`` where the heads have a norm with a weight, else ``head_scale``. They are measured on
    untrained models, which are built in memory; means over ``draws`` of their weights.

    Args:
        config: a ``DiffTransformerConfig``.
        input_ids: tokens ``[B, T]`` to measure on; None draws 8 rows of ``length`` tokens with frequencies
            proportional to 1 / rank.
    """
    from diff_transformer.model.config import matched_baseline

    if input_ids is None:
        generator = torch.Generator().manual_seed(seed)
        frequencies = 1 / torch.arange(1, config.vocab_size + 1).float()
        input_ids = torch.multinomial(frequencies, 8 * length, replacement=True, generator=generator).view(8, length)
    matched = copy.deepcopy(config)
    matched.head_scale, field = 1.0, "head_scale"
    if config.variant.head_norm == "weighted":
        matched.head_norm_init, field = 1.0, "head_norm_init"
    baseline, seeds = matched_baseline(matched), range(seed, seed + draws)
    targets = _means(head_outputs(baseline, input_ids, each) for each in seeds)
    sizes = _means(head_outputs(matched, input_ids, each, targets) for each in seeds)
    setattr(matched, field, [target / size for target, size in zip(targets, sizes, strict=True)])
    return matched


def _means(of_draws: Iterable[list[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*of_draws, strict=True)]
