"""The part of a layer after vLLM's attention: lambda, the subtraction and the head norm, in fp32.

Each module has its parameters under their names in a checkpoint. ``finish`` derives from them, once they are loaded,
what a forward pass needs, in buffers that are saved: ``--load-format sharded_state`` copies a state dict and loads no
weights. Legend as in ``attention.py``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.linear import ColumnParallelLinear

from diff_transformer.model.lambdas import lambda_init


class SoftmaxCore(nn.Module):
    """The heads as they are, each of them normalised, or times a gate of each token (``"gated"``)."""

    def __init__(self, config, quantization, prefix: str):
        super().__init__()
        eps, heads = config.head_norm_eps or config.rms_norm_eps, config.heads.outputs
        gated = config.variant.gate == "result"
        self.lam = TokenLambda(config.hidden_size, heads, 1, quantization, f"{prefix}.lam") if gated else None
        self.head_norm = HeadNorm(config.heads.value_dim, eps) if config.softmax_head_norm else None

    def queries(self, q: Tensor) -> Tensor:
        """``q [T, query heads * d]`` as the attention call takes it, before padding."""
        return q

    def forward(self, out: Tensor, hidden_states: Tensor) -> Tensor:
        """The call's output ``[T, query heads, dv]`` as W_O takes it, ``[T, output heads, dv]``."""
        if self.lam is not None:
            return out.float() * self.lam(hidden_states)
        return out if self.head_norm is None else self.head_norm(out)


class DiffCore(nn.Module):
    """``"diff"`` and ``"grouped_diff"``: r signal heads and their noise head are a group (r = 1 for ``"diff"``)."""

    placement: Tensor

    def __init__(self, config, layer_index: int):
        super().__init__()
        heads, depth = config.heads, config.lambda_init == "depth"
        initial = lambda_init(layer_index, config.lambda_depth_offset) if depth else float(config.lambda_init)
        eps, has_weight = config.head_norm_eps or config.rms_norm_eps, config.head_norm is True
        self.head_dim, self.gain = heads.head_dim, 1.0 - initial
        self.group = heads.queries // (heads.queries - heads.outputs)  # r + 1
        self.lam = LearnedLambda(heads.head_dim, initial) if config.lambda_learned else FixedLambda(initial)
        self.head_norm = HeadNorm(heads.value_dim, eps, self.gain, has_weight) if config.head_norm else None
        # Which half of a key each query of a group sees, [r + 1, 2, 1]: the second for the noise head, the last.
        placement = torch.eye(2)[[0] * (self.group - 1) + [1]][:, :, None]
        self.register_buffer("placement", placement.to(torch.get_default_dtype()), persistent=False)

    def queries(self, q: Tensor) -> Tensor:
        """``q [T, query heads * d]`` as ``[q1 | 0]`` and ``[0 | q2]``, ``[T, query heads * 2d]``."""
        grouped = q.view(q.shape[0], -1, self.group, 1, self.head_dim)
        return (grouped * self.placement).flatten(1)

    def forward(self, out: Tensor, hidden_states: Tensor) -> Tensor:
        groups = out.unflatten(1, (-1, self.group)).float()  # [T, groups, r + 1, dv]
        signal, noise = groups[:, :, :-1], groups[:, :, -1:]
        difference = torch.addcmul(signal, noise, self.lam.negative).flatten(1, 2)
        return difference * self.gain if self.head_norm is None else self.head_norm(difference)


class DiffV2Core(nn.Module):
    """``"diff_v2"`` and ``"diff_v3"``: query heads 2i and 2i+1 share keys and values.

    lambda is one of each token and head; in V3 the first map has such a weight too.
    """

    def __init__(self, config, quantization, prefix: str):
        super().__init__()
        heads, columns = config.heads.outputs, config.variant.sigmoids
        self.lam = TokenLambda(config.hidden_size, heads, columns, quantization, f"{prefix}.lam")

    def queries(self, q: Tensor) -> Tensor:
        return q

    def forward(self, out: Tensor, hidden_states: Tensor) -> Tensor:
        first, second = out.unflatten(1, (-1, 2)).float().unbind(2)
        weights = self.lam(hidden_states)  # [T, h, 1 or 2]
        if weights.shape[2] == 2:
            first = first * weights[:, :, :1]
        return torch.addcmul(first, second, weights[:, :, -1:], value=-1)


Core = SoftmaxCore | DiffCore | DiffV2Core


def core_of(config, layer_index: int, quantization, prefix: str) -> Core:
    """The core of layer ``layer_index``; ``prefix`` is its name in the model."""
    if config.variant.maps == 1:
        return SoftmaxCore(config, quantization, prefix)
    return DiffV2Core(config, quantization, prefix) if config.variant.sigmoids else DiffCore(config, layer_index)


def finish(model: nn.Module) -> None:
    """Derive the buffers of all parts of ``model`` from their parameters, once these are loaded."""
    for part in model.modules():
        if isinstance(part, LearnedLambda | HeadNorm):
            part.finish()


class LearnedLambda(nn.Module):
    """``negative`` is minus the layer's lambda, as the subtraction takes it; a scalar."""

    negative: Tensor

    def __init__(self, head_dim: int, initial: float):
        super().__init__()
        self.initial = initial
        self.lambda_q1, self.lambda_k1, self.lambda_q2, self.lambda_k2 = (
            nn.Parameter(torch.zeros(head_dim, dtype=torch.float32), requires_grad=False) for _ in range(4)
        )
        self.register_buffer("negative", torch.tensor(-initial, dtype=torch.float32))

    def finish(self) -> None:
        first = torch.dot(self.lambda_q1, self.lambda_k1).exp()
        second = torch.dot(self.lambda_q2, self.lambda_k2).exp()
        self.negative.copy_(second - first - self.initial)


class FixedLambda(nn.Module):
    """lambda that is ``lambda_init`` itself."""

    negative: Tensor

    def __init__(self, initial: float):
        super().__init__()
        self.register_buffer("negative", torch.tensor(-initial, dtype=torch.float32), persistent=False)


class TokenLambda(nn.Module):
    """``sigmoid(X W_lambda)``, fp32 ``[T, h, columns]``, of the heads of one rank: a gate, lambda, or both."""

    def __init__(self, hidden_size: int, heads: int, columns: int, quantization, prefix: str):
        super().__init__()
        self.columns = columns
        self.proj = ColumnParallelLinear(
            hidden_size, columns * heads, bias=False, quant_config=quantization, prefix=f"{prefix}.proj"
        )

    def forward(self, hidden_states: Tensor) -> Tensor:
        logits, _ = self.proj(hidden_states)
        return logits.float().sigmoid().unflatten(-1, (-1, self.columns))


class HeadNorm(nn.Module):
    """RMSNorm of each head in fp32, times its weight, if there is one, and ``gain``."""

    scaled: Tensor

    def __init__(self, width: int, eps: float, gain: float = 1.0, has_weight: bool = True):
        super().__init__()
        self.width, self.eps, self.gain = width, eps, gain
        self.weight = nn.Parameter(torch.ones(width), requires_grad=False) if has_weight else None
        self.register_buffer("scaled", torch.full((width,), gain, dtype=torch.float32))

    def finish(self) -> None:
        if self.weight is not None:
            self.scaled.copy_(self.weight.float() * self.gain)

    def forward(self, x: Tensor) -> Tensor:
        """``x [T, heads, width]`` normalised, in fp32."""
        return F.rms_norm(x.float(), (self.width,), self.scaled, self.eps)
