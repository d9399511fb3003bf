"""Size of the heads' outputs before training, and the head-norm weight that makes it equal for both models of a pair.

Softmax attention over t nearly independent values of size s gives about s / sqrt(t): small, and smaller with length.
The head norm gives 1 - lambda_init (0.8 in the first layer) for any width, length and initial weights.
"""

import torch
from torch import Tensor

from diff_transformer.checks import require_positive
from diff_transformer.errors import UserError
from diff_transformer.model.lambdas import lambda_init


def head_outputs(config, input_ids: Tensor, seed: int = 0) -> list[float]:
    """Root mean square of W_O's input in each layer of an untrained model of ``config``, on tokens ``[B, T]``."""
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DiffTransformerForCausalLM(config).eval()
    found: list[float] = []

    def note(_, inputs):
        found.append(inputs[0].float().square().mean().sqrt().item())

    for layer in model.model.layers:
        layer.self_attn.o_proj.register_forward_pre_hook(note)
    with torch.no_grad():
        model(input_ids, use_cache=False)
    return found


def matched_head_norm_init(config, input_ids: Tensor | None = None, *, length: int = 128, seed: int = 0) -> list[float]:
    """For each layer the ``head_norm_init`` that gives a head's output the size it has in the matched Transformer.

    It is measured on an untrained ``matched_baseline``, which is built in memory: the RMS of its attention's output in
    that layer, divided by ``1 - lambda_init``.

    Args:
        config: a ``DiffTransformerConfig`` with differential attention and a head norm.
        input_ids: tokens ``[B, T]`` to measure on; None draws 8 rows of ``length`` tokens with frequencies
            proportional to 1 / rank.

    Raises:
        UserError: for attention without a head norm, or one without a weight.
    """
    from diff_transformer.model.config import matched_baseline

    if config.variant.maps == 1 or config.variant.head_norm != "weighted":
        raise UserError(
            f"attention={config.attention!r} with head_norm={config.head_norm!r} has no weight of a head norm to set; "
            f"give a configuration with differential attention and head_norm=True"
        )
    if input_ids is None:
        require_positive(length=length)
        generator = torch.Generator().manual_seed(seed)
        frequencies = 1 / torch.arange(1, config.vocab_size + 1).float()
        input_ids = torch.multinomial(frequencies, 8 * length, replacement=True, generator=generator).view(8, length)
    softmax = head_outputs(matched_baseline(config), input_ids, seed)
    starts = (
        lambda_init(layer, config.lambda_depth_offset) if config.lambda_init == "depth" else float(config.lambda_init)
        for layer in range(config.num_hidden_layers)
    )
    return [size / (1 - start) for size, start in zip(softmax, starts, strict=True)]
