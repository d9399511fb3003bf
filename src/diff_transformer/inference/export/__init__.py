"""Write a checkpoint with its own code: ``trust_remote_code`` loads it where this package is not installed."""

from pathlib import Path

from diff_transformer.inference.export.flatten import flatten
from diff_transformer.model.loading import load_model

AUTO_MAP = {
    "AutoConfig": "configuration_diff_transformer.DiffTransformerConfig",
    "AutoModel": "modeling_diff_transformer.DiffTransformerModel",
    "AutoModelForCausalLM": "modeling_diff_transformer.DiffTransformerForCausalLM",
}


def export(model: str, out: Path, *, dtype: str | None = None) -> None:
    """Write ``model`` with its tokenizer and its code to the new folder ``out``, as safetensors.

    ``AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)`` loads it. It uses PyTorch's attention, or this
    package's kernels where the same version of the package is installed.

    Args:
        model: a folder, a name on the hub, or a preset (untrained).
        dtype: "float32", "bfloat16" or "float16"; None keeps that of the checkpoint.

    Raises:
        ValueError: for a model of another architecture, or as ``load_model``.
        FileNotFoundError, FileExistsError: if there is no such model, or ``out`` is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is not an empty folder; choose another")
    loaded, tokenizer = load_model(model, device="cpu", dtype=dtype)
    if loaded.config.model_type != "diff_transformer":
        raise ValueError(
            f"{model} is a {loaded.config.model_type} model, which transformers loads without code of ours; export is "
            "for models of this package (convert a Llama with `diff-transformer convert` first)"
        )
    loaded.config.auto_map = dict(AUTO_MAP)
    loaded.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for name, text in flatten().items():
        (out / name).write_text(text, encoding="utf-8")
