"""Weights of other implementations: Llama-family softmax models to the matched Transformer, and back."""

from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.modeling import DiffTransformerForCausalLM

_SHARED_FIELDS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters", "rms_norm_eps",
    "tie_word_embeddings", "initializer_range", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip


def from_llama(llama: LlamaForCausalLM) -> DiffTransformerForCausalLM:
    """The matched Transformer (``attention="softmax"``) with the weights of a Llama model; equal logits.

    Raises:
        ValueError: if the Llama model has biases or another activation than SiLU, which this architecture lacks.
    """
    config = llama.config
    if config.attention_bias or config.mlp_bias or config.hidden_act != "silu":
        raise ValueError(
            f"attention_bias={config.attention_bias}, mlp_bias={config.mlp_bias}, hidden_act={config.hidden_act!r}: "
            "the matched Transformer has no biases and SwiGLU with silu; convert a Llama model without them"
        )
    ours = DiffTransformerConfig(attention="softmax", **{name: getattr(config, name) for name in _SHARED_FIELDS})
    return _with_weights(DiffTransformerForCausalLM(ours), llama)


def to_llama(model: DiffTransformerForCausalLM) -> LlamaForCausalLM:
    """The inverse of ``from_llama``.

    Raises:
        ValueError: for a model with differential attention or head norms, which Llama's architecture cannot hold.
    """
    if model.config.attention != "softmax":
        raise ValueError(f"attention is {model.config.attention!r}; Llama's architecture holds 'softmax' only")
    if model.config.softmax_head_norm:
        raise ValueError("softmax_head_norm is True; Llama's architecture has no norm on the heads")
    config = LlamaConfig(**{name: getattr(model.config, name) for name in _SHARED_FIELDS})
    return _with_weights(LlamaForCausalLM(config), model)


def _with_weights(target, source):
    target.load_state_dict(source.state_dict(), strict=True)
    return target.to(next(source.parameters()).dtype).train(source.training)


def convert_folder(source: Path, out: Path, origin: str, target: str) -> None:
    """Convert the model in ``source`` and write it, with its tokenizer if it has one, to the new folder ``out``.

    Raises:
        ValueError: for a pair of formats other than llama and diff-transformer.
        FileNotFoundError, FileExistsError: if ``source`` is no folder, or ``out`` is not empty.
    """
    if {origin, target} != {"llama", "diff-transformer"}:
        raise ValueError(f"cannot convert from {origin!r} to {target!r}; accepted: llama to diff-transformer, or back")
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not a folder; give the folder of a saved model")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; choose another folder")
    if origin == "llama":
        converted = from_llama(LlamaForCausalLM.from_pretrained(source, dtype="auto"))
    else:
        converted = to_llama(DiffTransformerForCausalLM.from_pretrained(source, dtype="auto"))
    converted.save_pretrained(out)
    if (source / "tokenizer.json").exists():
        PreTrainedTokenizerFast.from_pretrained(source).save_pretrained(out)
