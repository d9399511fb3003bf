"""Which core each kind of attention has: the few lines in which the models of this package differ."""

from diff_transformer.model.cores import Core, DiffCore, DiffV2Core, GroupedDiffCore, SoftmaxCore
from diff_transformer.model.dint import DintCore
from diff_transformer.model.heads import ATTENTIONS, HeadCounts, check_attention, check_head_norm
from diff_transformer.model.lambdas import FixedLambda, LearnedLambda, TokenLambda, check_lambda_init, lambda_init
from diff_transformer.model.layers import RMSNorm


def diff_core(
    attention: str,
    hidden_size: int,
    heads: HeadCounts,
    layer_index: int,
    *,
    lambda_init: str | float,
    lambda_depth_offset: int = 0,
    lambda_learned: bool,
    lambda_std: float,
    head_norm: bool | str,
    head_norm_init: float,
    norm_eps: float,
    backend: str,
    is_causal: bool,
) -> DiffCore:
    """The core of differential attention or of a relative; the arguments are fields of ``DiffTransformerConfig``.

    Raises:
        ValueError: for another attention, a ``lambda_init`` that is neither ``"depth"`` nor a number below 1, or an
            unknown head norm.
    """
    check_attention(attention, ATTENTIONS[:-1])
    check_head_norm(head_norm, head_norm_init)
    if attention == "diff_v2":
        return DiffV2Core(TokenLambda(hidden_size, heads.outputs), backend=backend)
    start = _lambda_start(lambda_init, layer_index, lambda_depth_offset)
    lam = LearnedLambda(heads.head_dim, start, lambda_std) if lambda_learned else FixedLambda(start)
    norm = RMSNorm(heads.value_dim, norm_eps, head_norm_init, head_norm is True) if head_norm else None
    if attention == "grouped_diff":
        return GroupedDiffCore(lam, norm, backend, signal=heads.outputs // (heads.queries - heads.outputs))
    if attention == "dint":
        return DintCore(lam, norm, backend, is_causal=is_causal)
    return DiffCore(lam, norm, backend)


def core_of(config, layer_index: int, backend: str) -> Core:
    """The core of layer ``layer_index`` of a model, with its window."""
    heads, norm_init = config.heads, config.head_norm_init
    if isinstance(norm_init, list | tuple):
        norm_init = norm_init[layer_index]
    if config.attention == "softmax":
        norm = RMSNorm(heads.value_dim, config.head_norm_eps or config.rms_norm_eps, norm_init)
        core = SoftmaxCore(norm if config.softmax_head_norm else None, backend=backend)
    else:
        core = diff_core(
            config.attention,
            config.hidden_size,
            heads,
            layer_index,
            lambda_init=config.lambda_init,
            lambda_depth_offset=config.lambda_depth_offset,
            lambda_learned=config.lambda_learned,
            lambda_std=config.lambda_std,
            head_norm=config.head_norm,
            head_norm_init=norm_init,
            norm_eps=config.head_norm_eps or config.rms_norm_eps,
            backend=backend,
            is_causal=True,
        )
    core.window = config.sliding_window
    return core


def _lambda_start(setting: str | float, layer_index: int, depth_offset: int) -> float:
    check_lambda_init(setting)
    if setting == "depth":
        return lambda_init(layer_index, depth_offset)
    return float(setting)
