"""Starting a run from the weights of a saved model: ``train.initial_model``."""

import shlex
from pathlib import Path

import torch

from diff_transformer.train.config import RunConfig


def load_initial_model(config: RunConfig, tokenizer):
    """The model in the folder ``config.train.initial_model``, in fp32, with a fresh optimizer to come.

    The folder is that of a model of this package, or of a finished run (its ``model`` is taken). Fields in
    ``config.model`` replace those of the saved configuration, where the weights stay the same: ``rope_parameters``,
    ``max_position_embeddings``, ``backend`` and the like.

    Raises:
        FileNotFoundError: if there is no model in the folder.
        ValueError: if it is another library's, was trained with another tokenizer, or ``config.model`` asks for other
            weights than it has.
    """
    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.loaded import misfits
    from diff_transformer.model.loading import read_model
    from diff_transformer.model.modeling import DiffTransformerForCausalLM

    folder = model_folder(config)
    _check_tokenizer(folder, tokenizer)
    saved = DiffTransformerConfig.from_pretrained(folder)
    fields = {name: getattr(saved, name) for name in DiffTransformerConfig.__annotations__ if hasattr(saved, name)}
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    settings = DiffTransformerConfig(**{**fields, **special, **config.model})
    model, found = read_model(
        folder, DiffTransformerForCausalLM, config=settings, dtype=torch.float32, output_loading_info=True
    )
    wrong = misfits(found)
    if wrong:
        raise ValueError(
            f"config.model (attention={settings.attention!r}) does not fit the weights in {folder}: {wrong}. Leave "
            "out the fields that differ, or make the other model first (diff-transformer convert)"
        )
    return model


def vocabulary_size(config: RunConfig) -> int:
    """``model.vocab_size``, or where it is not given that of ``train.initial_model``.

    Raises:
        ValueError: if neither is given, or the model is another library's.
        FileNotFoundError: if there is no model in the folder.
    """
    if "vocab_size" in config.model:
        return config.model["vocab_size"]
    if config.train.initial_model is None:
        raise ValueError("nothing says what the model is; give train.initial_model, a folder, or model.vocab_size")
    from diff_transformer.model.config import DiffTransformerConfig

    return DiffTransformerConfig.from_pretrained(model_folder(config)).vocab_size


def model_folder(config: RunConfig) -> Path:
    """The folder of the model of ``train.initial_model``, which may be that of a finished run.

    Raises:
        FileNotFoundError: if there is none. ValueError: if it is another library's.
    """
    folder = Path(str(config.train.initial_model)).expanduser()
    inner = folder / "model"
    if (inner / "config.json").exists():
        folder = inner
    if not (folder / "config.json").exists():
        raise FileNotFoundError(
            f"train.initial_model is {folder}, which holds no model (no config.json); give the folder of a saved model "
            "or of a finished run"
        )
    _refuse_other_kinds(folder)
    return folder


def _refuse_other_kinds(folder: Path) -> None:
    from diff_transformer.model.config import DiffTransformerConfig
    from diff_transformer.model.convert.checkpoint import read_settings
    from diff_transformer.model.convert.layouts import LAYOUTS

    kind, ours = (read_settings(folder) or {}).get("model_type"), DiffTransformerConfig.model_type
    if kind in (None, ours):
        return
    convertible = {name for layout in LAYOUTS.values() for name in layout.model_types} - {ours}
    if kind in convertible:
        remedy = (
            f"make one of it with `diff-transformer convert {shlex.quote(str(folder))} --out NEW` and set "
            "train.initial_model=NEW"
        )
    else:
        remedy = f"give one of it, or of a kind that diff-transformer convert reads: {', '.join(sorted(convertible))}"
    raise ValueError(f"train.initial_model is {folder}, a {kind!r} model and not one of this package; {remedy}")


def _check_tokenizer(folder: Path, tokenizer) -> None:
    from diff_transformer.data.tokenizer import load_tokenizer

    if (folder / "tokenizer.json").exists() and load_tokenizer(str(folder)).get_vocab() != tokenizer.get_vocab():
        raise ValueError(f"the model in {folder} was trained with another tokenizer; set data.tokenizer={folder}")
