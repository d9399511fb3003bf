"""Write a model of this package as its tensors and settings stand in Motif's published folders."""

import json
from pathlib import Path

from safetensors.torch import save_file

from diff_transformer import DiffTransformerForCausalLM
from diff_transformer.model.convert import motif

SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id",
)  # fmt: skip


def write_motif(model: DiffTransformerForCausalLM, folder: Path) -> None:
    """``model`` has ``lambda_depth_offset=-1``."""
    config = model.config
    settings = {name: getattr(config, name) for name in SAME}
    settings |= {"model_type": "motif", "architectures": ["MotifForCausalLM"], "torch_dtype": "float32"}
    settings |= {
        "rope_theta": config.rope_parameters["rope_theta"],
        "attn_rms_norm_eps": config.head_norm_eps or config.rms_norm_eps,
    }
    if config.attention == "grouped_diff":
        settings |= {"num_noise_heads": config.heads.queries - config.heads.outputs, "k_ratio": 1}
    names = {new: old for old, new in motif._NAMES.items()}
    state = {}
    for name, tensor in model.state_dict().items():
        for new, old in names.items():
            name = name.replace(new, old)
        state[name] = tensor.contiguous()
    if config.tie_word_embeddings:
        del state["lm_head.weight"]
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(state, folder / "model.safetensors")
