"""Tiny random decoders of transformers, one for each architecture that ``differentiate`` is tried on.

PYTHONPATH=src python tests/helpers/architectures.py     # writes the record that docs/pretrained_to_diff.md shows
"""

import json
from pathlib import Path

import torch

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "differentiate.json"
SIZES = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WINDOWS = {"head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16}
_LAYERS = ["sliding_attention", "full_attention"]

# name in the table: (prefix of the configuration's class, fields)
ARCHITECTURES = {
    "Llama": ("Llama", {}),
    "Llama with biases": ("Llama", {"attention_bias": True, "tie_word_embeddings": True}),
    "Mistral": ("Mistral", {"sliding_window": 8}),
    "Mixtral": ("Mixtral", {"num_local_experts": 2}),
    "Qwen2, Qwen2.5": ("Qwen2", {}),
    "Qwen3": ("Qwen3", {"head_dim": 16}),
    "Qwen3-MoE": ("Qwen3Moe", {"head_dim": 16, **_EXPERTS}),
    "Gemma": ("Gemma", {"head_dim": 16}),
    "Gemma 2": ("Gemma2", _WINDOWS),
    "Gemma 2, attn_logit_softcapping=None": ("Gemma2", {**_WINDOWS, "attn_logit_softcapping": None}),
    "Gemma 3 (text)": ("Gemma3Text", {**_WINDOWS, "layer_types": _LAYERS}),
    "SmolLM2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 8, "num_key_value_heads": 4}),
    "SmolLM3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "Granite": ("Granite", {"attention_multiplier": 0.1}),
    "Cohere": ("Cohere", {"use_qk_norm": True}),
    "Cohere 2": ("Cohere2", {"sliding_window": 8, "layer_types": _LAYERS}),
    "Starcoder2": ("Starcoder2", {"sliding_window": 8}),
    "GLM-4": ("Glm4", {"head_dim": 16}),
    "OLMo 2": ("Olmo2", {}),
    "OLMo 2, one key/value head": ("Olmo2", {"num_key_value_heads": 1}),
    "OLMo 3": ("Olmo3", {"sliding_window": 8, "layer_types": _LAYERS}),
    "Phi": ("Phi", {"qk_layernorm": True}),
    "Phi-3, Phi-4": ("Phi3", {"sliding_window": 8}),
    "GPT-NeoX, Pythia": ("GPTNeoX", {}),
    "GPT-2": ("GPT2", {"n_positions": 128, "attn_pdrop": 0.0}),
    "EXAONE 4": ("Exaone4", {}),
    "gpt-oss": ("GptOss", {"head_dim": 16, "num_local_experts": 2}),
    "DeepSeek-V3": ("DeepseekV3", {"q_lora_rank": 8, "kv_lora_rank": 8, "first_k_dense_replace": 2}),
    "Qwen3-Next": ("Qwen3Next", {"head_dim": 16, "layer_types": ["full_attention"] * 2, **_EXPERTS}),
    "OPT": ("OPT", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    "BLOOM": ("Bloom", {}),
    "Mamba 2": ("Mamba2", {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 8}),
    "DiffLlama": ("DiffLlama", {}),
    "T5": ("T5", {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4}),
    "BERT": ("Bert", {}),
    "Gemma 3 (with images)": ("Gemma3", {}),
}


def tiny(name, **fields):
    """The model called ``name``, in eval mode, with the same weights on every call; all of them, biases too, random."""
    import transformers

    prefix, own = ARCHITECTURES[name]
    torch.manual_seed(0)
    if name == "Gemma 3 (with images)":
        vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.Gemma3Config(
            text_config={**SIZES, **_WINDOWS}, vision_config={**vision, "image_size": 28}
        )
        return transformers.Gemma3ForConditionalGeneration(config).eval()
    config = getattr(transformers, f"{prefix}Config")(**{**SIZES, **own, **fields})
    auto = transformers.AutoModelForSeq2SeqLM if name == "T5" else transformers.AutoModelForCausalLM
    model = auto.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def record():
    """The answer to each architecture: "" where it is taken, else why not."""
    import transformers

    from diff_transformer.model.parts import read

    rows = []
    for name in ARCHITECTURES:
        try:
            read(tiny(name))
            rows.append({"model": name, "refused": ""})
        except ValueError as error:
            rows.append({"model": name, "refused": str(error)})
    return {"transformers": transformers.__version__, "rows": rows}


if __name__ == "__main__":
    RECORD.write_text(json.dumps(record(), indent=1) + "\n")
