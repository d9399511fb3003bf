"""Parts that the DIFF Transformer and its matched Transformer share: RMSNorm, SwiGLU, rotary embedding."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension; statistics in fp32 or wider, result in the input's dtype."""

    def __init__(self, width: int, eps: float = 1e-5, initial: float = 1.0, has_weight: bool = True):
        super().__init__()
        self.width, self.eps, self.initial = width, eps, initial
        self.weight: nn.Parameter | None
        self.register_parameter("weight", nn.Parameter(torch.full((width,), float(initial))) if has_weight else None)

    def forward(self, x: Tensor, gain: float = 1.0) -> Tensor:
        """``x [..., width]`` divided by its root mean square, times the weight (if there is one) and ``gain``."""
        if self.weight is None:
            return F.rms_norm(x, (self.width,), None, self.eps) * gain
        weight = self.weight if gain == 1.0 else self.weight * gain
        if weight.dtype == x.dtype:
            return F.rms_norm(x, (self.width,), weight, self.eps)
        return F.rms_norm(x.float(), (self.width,), weight.float(), self.eps).to(x.dtype)


def clip_rms(x: Tensor, limit: float) -> Tensor:
    """``x [..., width]`` times ``min(1, limit / rms(x))``, RMSClip; statistics in fp32 or wider, in x's dtype."""
    size = x.to(torch.promote_types(x.dtype, torch.float32)).square().mean(-1, keepdim=True).sqrt()
    return x * (limit / size.clamp_min(limit)).to(x.dtype)


class PolyNorm(nn.Module):
    """``w_0 n(x^3) + w_1 n(x^2) + w_2 n(x) + b`` with ``n(z) = z / rms(z)`` over the last dimension (arXiv 2411.03884).

    Powers and statistics in fp32 or wider, result in the input's dtype; weights start at 1/3, the bias at 0.
    """

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.full((3,), 1 / 3))
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        powers = (wide**3, wide**2, wide)
        normed = (F.rms_norm(power, power.shape[-1:], None, self.eps) for power in powers)
        weights = self.weight.to(wide.dtype)
        out = sum(weight * power for weight, power in zip(weights, normed, strict=True))
        return (out + self.bias.to(wide.dtype)).to(x.dtype)


class SwiGLU(nn.Module):
    """``(swish(x W_1) * x W_2) W_3`` (section 2.2), under the names of Llama checkpoints.

    ``activation="poly_norm"`` replaces swish by ``PolyNorm``.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, activation: str = "silu"):
        super().__init__()
        self.act_fn = PolyNorm() if activation == "poly_norm" else nn.SiLU()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def keeping_precision(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """``fn`` of ``nn.Module._apply`` for tensors that stay fp32 when the model is cast to half precision."""

    def apply(tensor: Tensor) -> Tensor:
        moved = fn(tensor)
        return tensor.to(moved.device) if moved.dtype in (torch.float16, torch.bfloat16) else moved

    return apply


def rotary_tables(position_ids: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin ``[B, T, head_dim]`` in fp32 for integer positions ``[B, T]`` (rotating halves, as Hugging Face)."""
    exponent = torch.arange(0, head_dim, 2, device=position_ids.device, dtype=torch.float32) / head_dim
    angles = position_ids[..., None].float() / theta**exponent  # [B, T, head_dim / 2]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x [B, T, heads, head_dim]`` by ``cos, sin [B, T, head_dim]``; returns x's dtype."""
    cos, sin = cos[:, :, None].to(x.dtype), sin[:, :, None].to(x.dtype)
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
