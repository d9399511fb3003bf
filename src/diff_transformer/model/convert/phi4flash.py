"""Phi-4-mini-flash-reasoning (microsoft, SambaY): its differential attention, layer by layer.

The model alternates Mamba layers with differential attention. In its second half, gated memory units alternate with
attention to the keys and values of one earlier layer. This package's model has neither these nor LayerNorm with biases,
so the whole model is refused. The attention layers convert exactly: no positions, neighbouring heads paired, ``subln``
with a weight and eps 1e-5, lambda_init by the layer's index from 0, biases on all projections, a window in the odd
layers of the first half. Source: the model's ``modeling_phi4flash.py`` and its safetensors index.
"""

from pathlib import Path

from torch import Tensor

from diff_transformer.model.attention import DiffAttention
from diff_transformer.model.convert.checkpoint import Checkpoint
from diff_transformer.model.convert.plan import LAMBDAS, check_tensors
from diff_transformer.model.saved import read_settings

_NORM_EPS = 1e-5
_DEFAULT_WINDOW = 2047


def read_config(checkpoint: Checkpoint):
    """Refuse the whole model and say which parts can be converted.

    Raises:
        ValueError: always.
    """
    settings = read_settings(checkpoint.folder) or {}
    layers = settings.get("num_hidden_layers", 32)
    half = layers // 2
    raise ValueError(
        f"{checkpoint.folder} is Phi-4-mini-flash (SambaY), which this package's model cannot hold. Missing here: "
        f"Mamba layers (every second one up to layer {half}), gated memory units (every second one after it), "
        f"attention to the keys and values of layer {half + 1} (every second layer from {half + 3}), LayerNorm with "
        "biases. Its differential attention layers, with their biases, convert to DiffAttention modules with equal "
        "outputs: diff_transformer.model.convert.phi4flash_attention(folder)"
    )


def phi4flash_attention(folder: Path) -> dict[int, DiffAttention]:
    """Convert the differential attention layers of a checkpoint; return them by layer index, in the checkpoint's dtype.

    Input and output are those of the layer's ``attn``: after its LayerNorm, with the bias of ``out_proj``. A layer in
    the second half projects only queries. It gets the key and value projections of layer n/2 + 1 and takes that
    layer's input as ``context``: ``layer(x, context)``.

    Raises:
        ValueError: if the folder is another model's, or tensors are missing.
        FileNotFoundError: if it holds no safetensors.
    """
    checkpoint = Checkpoint(folder)
    settings = read_settings(folder) or {}
    if settings.get("model_type") != "phi4flash":
        raise ValueError(f"{folder} holds a {settings.get('model_type')!r} model; expected 'phi4flash'")
    layers, period = settings["num_hidden_layers"], settings.get("mb_per_layer", 2)
    attention = [i for i in range(layers) if not period or i % period]
    return {i: _layer(checkpoint, settings, i) for i in attention}


def _layer(checkpoint: Checkpoint, settings: dict, index: int) -> DiffAttention:
    width, heads = settings["hidden_size"], settings["num_attention_heads"]
    key_heads = settings.get("num_key_value_heads") or heads
    d, half = width // heads, settings["num_hidden_layers"] // 2
    shared = index >= half + 2
    own = _tensors(checkpoint, index, heads * d if shared else (heads + 2 * key_heads) * d, heads * d, d, width)
    sizes = [heads * d, key_heads * d, key_heads * d]
    state = {}
    for part in ("weight", "bias"):
        fused = own[f"Wqkv.{part}"]
        if shared:
            source = checkpoint.tensor(f"model.layers.{half + 1}.attn.Wqkv.{part}")
            q, k, v = fused, *source.split(sizes)[1:]
        else:
            q, k, v = fused.split(sizes)
        state |= {f"q_proj.{part}": q, f"k_proj.{part}": k, f"v_proj.{part}": v}
        state[f"o_proj.{part}"] = own[f"out_proj.{part}"]
    state |= {f"core.lam.{name}": own[f"inner_cross_attn.{name}"] for name in LAMBDAS}
    state["core.head_norm.weight"] = own["inner_cross_attn.subln.weight"]
    window = settings.get("sliding_window", _DEFAULT_WINDOW)
    layer = DiffAttention(
        width,
        heads,
        num_key_value_heads=key_heads,
        head_dim=d,
        is_causal=True,
        layer_index=index,
        norm_eps=_NORM_EPS,
        window=window if index < half else None,
        bias=True,
    )
    layer.to(own["Wqkv.weight"].dtype).load_state_dict(state)
    return layer


def _tensors(checkpoint: Checkpoint, index: int, fused: int, out: int, d: int, width: int) -> dict[str, Tensor]:
    prefix = f"model.layers.{index}.attn."
    expected = {
        "Wqkv.weight": (fused, width),
        "Wqkv.bias": (fused,),
        "out_proj.weight": (width, out),
        "out_proj.bias": (width,),
        **{f"inner_cross_attn.{name}": (d,) for name in LAMBDAS},
        "inner_cross_attn.subln.weight": (2 * d,),
    }
    found = {name: shape for name, shape in checkpoint.shapes().items() if name.startswith(prefix)}
    check_tensors(found, {prefix + name: shape for name, shape in expected.items()}, (), f"attention layer {index}")
    return {name: checkpoint.tensor(prefix + name) for name in expected}
