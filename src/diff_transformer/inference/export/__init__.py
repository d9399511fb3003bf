"""Write a checkpoint with its own code: ``trust_remote_code`` loads it where this package is not installed."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diff_transformer.durable import replacing
from diff_transformer.inference.export.flatten import flatten
from diff_transformer.model.card import read_training, write_card
from diff_transformer.model.loading import load_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

AUTO_MAP = {
    "AutoConfig": "configuration_diff_transformer.DiffTransformerConfig",
    "AutoModel": "modeling_diff_transformer.DiffTransformerModel",
    **{
        f"AutoModelFor{task}": f"modeling_diff_transformer.DiffTransformerFor{task}"
        for task in ("CausalLM", "SequenceClassification", "TokenClassification", "QuestionAnswering")
    },
}
ENGINE_AUTO_MAP = {
    "AutoConfig": "engine_form.DiffEngineConfig",
    "AutoModel": "engine_form.DiffEngineModel",
    "AutoModelForCausalLM": "engine_form.DiffEngineForCausalLM",
}


def export(
    model: "str | PreTrainedModel",
    out: Path,
    *,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    dtype: str | None = None,
    for_engines: bool = False,
) -> None:
    """Write ``model`` with its tokenizer and its code to the new folder ``out``, as safetensors.

    ``AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True)`` loads it. It uses PyTorch's attention, or this
    package's kernels where the same version of the package is installed.

    Args:
        model: a folder, a name on the hub, or a preset (untrained); or a model in memory, in place of
            ``save_pretrained``.
        tokenizer: saved beside a model in memory; the others bring their own.
        dtype: "float32", "bfloat16" or "float16"; None keeps that of the checkpoint, or of the model in memory.
        for_engines: write the form of ``engine_form.py``, whose attention is one call of transformers' attention
            interface: for inference engines that run models through it. It has no training, maps or packed documents.

    Raises:
        ValueError: for a model of another architecture, or as ``load_model``.
        FileNotFoundError, FileExistsError: if there is no such model, or ``out`` is not empty.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FileExistsError(f"{out} is not an empty folder; choose another")
    if isinstance(model, str):
        loaded, tokenizer = load_model(model, device="cpu", dtype=dtype)
        name, training = model, read_training(Path(model).expanduser())
    else:
        loaded, name, training = model, "the model", None
        if dtype is not None:
            raise ValueError(f"dtype={dtype!r} came with a model in memory; convert it first: model.to(torch.{dtype})")
    if getattr(loaded.config, "differential", None) is not None:
        raise ValueError(
            f"{name} was made differential in place, in a class of transformers, for which there is no form without "
            "this package; export is for models of this package"
        )
    if loaded.config.model_type != "diff_transformer":
        raise ValueError(
            f"{name} is a {loaded.config.model_type} model, which transformers loads without code of ours; export is "
            "for models of this package (convert a Llama with `diff-transformer convert` first)"
        )
    if for_engines and not type(loaded).__name__.endswith("ForCausalLM"):
        raise ValueError(
            f"{name} is a {type(loaded).__name__}; the form for engines holds causal language models only: leave "
            "for_engines out"
        )
    config = engine_config(loaded.config) if for_engines else None
    out.parent.mkdir(parents=True, exist_ok=True)
    with replacing(out.absolute()) as partial:
        partial.mkdir()
        write_card(loaded.config, partial, type(loaded).__name__, own_code=True, training=training)
        before = loaded.config.auto_map
        try:
            if config is None:
                loaded.config.auto_map = dict(AUTO_MAP)
            loaded.save_pretrained(partial)
        finally:
            loaded.config.auto_map = before
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        if config is not None:
            config.save_pretrained(partial)
            shutil.copy(Path(__file__).with_name("engine_form.py"), partial)
            return
        for name, text in flatten().items():
            (partial / name).write_text(text, encoding="utf-8")


def engine_config(config: Any):
    """The ``DiffEngineConfig`` of a ``DiffTransformerConfig``.

    Raises:
        ValueError: for a model that the form cannot hold, with the fields that are the reason.
    """
    from diff_transformer.inference.export.engine_form import DiffEngineConfig

    heads, attention = config.heads, config.attention
    width = heads.head_dim if attention in ("softmax", "diff_v2") else 2 * heads.head_dim
    wrong = [
        text
        for text, holds in (
            ("attention='dint'", attention == "dint"),
            (f"value_head_dim={config.value_head_dim}", heads.value_dim != width),
            (f"hidden_act={config.hidden_act!r}", config.hidden_act != "silu"),
            ("softmax_head_norm=True", config.softmax_head_norm),
        )
        if holds
    ]
    if wrong:
        narrow = attention != "diff_v2" and heads.value_dim != width
        raise ValueError(
            f"the form for engines cannot hold {' and '.join(wrong)}; export without it, or serve the model with "
            "`diff-transformer serve`"
            + ("; a softmax model converted with `convert --to diff_v2` has a form for engines" if narrow else "")
        )
    shared = (
        "attention", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings",
        "rope_parameters", "rms_norm_eps", "tie_word_embeddings", "lambda_init", "lambda_depth_offset",
        "lambda_learned", "head_norm", "initializer_range", "sliding_window", "pad_token_id", "bos_token_id",
        "eos_token_id", "dtype",
    )  # fmt: skip
    groups = heads.queries - heads.outputs  # one noise head each
    engine = DiffEngineConfig(
        **{name: getattr(config, name) for name in shared},
        num_attention_heads=heads.queries,
        num_key_value_heads=heads.values,
        head_dim=width,
        query_dim=heads.head_dim,
        outputs=heads.outputs,
        group=heads.queries // groups if groups else 0,
        head_norm_eps=config.head_norm_eps or config.rms_norm_eps,
        layer_types=["sliding_attention"] * config.num_hidden_layers if config.sliding_window else None,
        architectures=["DiffEngineForCausalLM"],
    )
    engine.auto_map = dict(ENGINE_AUTO_MAP)
    return engine
