"""``DiffAttention`` in timm: a wrapper with the arguments of timm's ``Attention``, and timm's own layers converted.

    timm.models.vision_transformer.VisionTransformer(attn_layer=Attention)    # tested with timm 1.0.31

timm tells only its own class a block's depth, so set the constants afterwards:
``block.attn.attention.core.lam.initial = lambda_init(depth)``. In nanoGPT, construct the wrapper with
``proj_bias=False, is_causal=True``.
"""

import torch

from diff_transformer import DiffAttention


class Attention(torch.nn.Module):
    """Returns one tensor, and takes a mask that is True where a query may attend; ``qk_norm`` is an RMSNorm."""

    def __init__(
        self,
        dim,
        num_heads=8,
        qkv_bias=False,
        qk_norm=False,
        scale_norm=False,
        proj_bias=True,
        attn_drop=0.0,
        proj_drop=0.0,
        norm_layer=None,
        device=None,
        dtype=None,
        **settings,
    ):
        super().__init__()
        if attn_drop or scale_norm or qkv_bias != proj_bias:
            raise ValueError(
                "DiffAttention has no attn_drop and no scale_norm, and biases on all projections or on none"
            )
        self.attention = DiffAttention(dim, num_heads, bias=qkv_bias, qk_norm=qk_norm, **settings)
        self.attention.to(device=device, dtype=dtype)
        self.proj_drop = torch.nn.Dropout(proj_drop)

    def forward(self, x, attn_mask=None, is_causal=False):
        return self.proj_drop(self.attention(x, attention_mask=attn_mask, is_causal=is_causal or None)[0])


def from_timm(theirs) -> DiffAttention:
    """A ``timm.layers.DiffAttention`` as ours. Its ``num_heads`` counts pairs of maps, hence the factor 2."""
    if theirs.dual_lambda or not all(
        isinstance(x, torch.nn.Identity) for x in (theirs.q_norm, theirs.k_norm, theirs.norm)
    ):
        raise ValueError("dual_lambda, qk_norm and scale_norm do not convert")
    weight, bias = theirs.qkv.weight, theirs.qkv.bias
    ours = DiffAttention(weight.shape[1], 2 * theirs.num_heads, bias=bias is not None, lambda_init=theirs.lambda_init)
    state = {f"core.lam.{name}": getattr(theirs, name) for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")}
    state |= {"core.head_norm.weight": theirs.sub_norm.weight, "o_proj.weight": theirs.proj.weight}
    state |= {f"{x}_proj.weight": part for x, part in zip("qkv", weight.chunk(3), strict=True)}
    if bias is not None:
        state |= {"o_proj.bias": theirs.proj.bias}
        state |= {f"{x}_proj.bias": part for x, part in zip("qkv", bias.chunk(3), strict=True)}
    ours.load_state_dict(state)
    return ours
