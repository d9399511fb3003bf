"""Convert a model, or the model in a folder, to another layout: what ``diff-transformer convert`` calls.

Every layout's module translates to this package's model, and most from it, so that layouts convert to one another.
"""

import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from diff_transformer.checks import first_line, listed, require_known
from diff_transformer.durable import replacing, require_writable
from diff_transformer.errors import UserError
from diff_transformer.model.card import source_facts
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.convert import diffllama, llama, motif
from diff_transformer.model.convert.conversion import converted
from diff_transformer.model.convert.from_softmax import to_differential
from diff_transformer.model.differentiate import KINDS, check_start, differentiate
from diff_transformer.model.loading import DTYPES, UNREADABLE, folder_of, read_model, read_settings
from diff_transformer.model.modeling import DiffTransformerForCausalLM
from diff_transformer.model.parts import DEX, read

PACKAGE = "diff-transformer"
_CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja",
    "generation_config.json",
)  # fmt: skip
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")


class Layout(NamedTuple):
    """A layout of checkpoints, known by its ``model_type`` in ``config.json``; ``module`` is None for this package."""

    title: str
    model_types: tuple[str, ...]
    module: ModuleType | None


LAYOUTS: dict[str, Layout] = {
    PACKAGE: Layout("this package's layout", ("diff_transformer",), None),
    "llama": Layout("a Llama-family softmax model", ("llama", "mistral"), llama),
    "diffllama": Layout("Hugging Face DiffLlama", ("diffllama",), diffllama),
    "motif": Layout("Motif-2.6B or Motif-2-12.7B", ("motif",), motif),
}
TARGETS = (PACKAGE, "llama", "diffllama", *KINDS)  # of ``convert_model``
FOLDER_TARGETS = (*TARGETS, DEX)


def convert_model(
    model: Any, target: str = PACKAGE, *, lambda_init: float = 0.5, dtype: torch.dtype | None = None
) -> Any:
    """A new model in another layout, with equal logits, that shares no tensor with ``model``; or the model itself,
    unchanged, if it is in that layout.

    Args:
        model: of this package, or a Llama, Mistral or DiffLlama of transformers.
        target: "diff-transformer", "llama" or "diffllama"; or "diff", "diff_v2" or "diff_v3", which turn a softmax
            Transformer of this package or a Llama into a DIFF Transformer of this package.
        lambda_init: initial lambda with ``target`` "diff", between 0 and 1.
        dtype: of all tensors but lambda vectors, which are fp32; None keeps the model's.

    Raises:
        UserError: for another model or target, and for a model that the target cannot hold.
    """
    return _converted(model, target, lambda_init, dtype)[0]


def _converted(model: Any, target: str, lambda_init: float, dtype: torch.dtype | None) -> tuple[Any, tuple[str, ...]]:
    """``convert_model``, and notes for the user."""
    require_known("target", target, TARGETS)
    layout = _layout_named(model.config.model_type)
    if layout is None:
        raise UserError(f"{type(model).__name__} is in no layout; accepted: {', '.join(LAYOUTS)}")
    source = LAYOUTS[layout].module
    if source is not None:
        first = dtype if target == PACKAGE else None  # rounded once, at the end
        model = converted(source.to_package(model.config), DiffTransformerForCausalLM, model, first)
    if target == PACKAGE:
        return model, ()
    if target in KINDS:
        conversion, model_class = to_differential(model.config, target, lambda_init), DiffTransformerForCausalLM
    else:
        module: Any = LAYOUTS[target].module
        conversion, model_class = module.from_package(model.config), module.MODEL
    return converted(conversion, model_class, model, dtype), conversion.notes


def convert_folder(
    source: Path | str,
    out: Path | str,
    target: str = PACKAGE,
    *,
    dtype: str | None = None,
    lambda_init: float = 0.5,
) -> list[str]:
    """Convert the model in ``source`` and write it, with its tokenizer if it has one, to the new folder ``out``.

    ``out`` appears when it is complete; nothing is overwritten.

    Args:
        source: folder with safetensors and the model's settings.
        out: new folder for the converted model.
        target: layout to write; or "diff", "diff_v2" or "diff_v3", which make a softmax model differential with equal
            logits. A decoder that no layout holds then keeps its class (``differentiate``). With "dex" every one does.
        dtype: dtype of the written tensors except lambda vectors: "float32", "bfloat16" or "float16"; None keeps that
            of the source.
        lambda_init: initial lambda with ``target`` "diff", between 0 and 1.

    Returns:
        Notes for the user: the layout of the source, what was folded, which files were copied.

    Raises:
        UserError: for unknown names, a folder without a model, a model that cannot be represented in the target, or an
            ``out`` that is not empty.
    """
    source, out = folder_of(str(source)), Path(out).expanduser()
    require_known("target", target, FOLDER_TARGETS)
    if target in (*KINDS, DEX):
        check_start(target, lambda_init)
    elif lambda_init != 0.5:
        raise UserError(f"lambda_init is {lambda_init!r}, which only the target 'diff' has; leave it out")
    if dtype is not None:
        require_known("dtype", dtype, DTYPES)
    cast = None if dtype is None else getattr(torch, dtype)
    require_writable(out.parent)
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise UserError(f"{out} exists already; choose a new folder")
    layout, settings = layout_of(source)
    in_place = target == DEX or (target in KINDS and package_config(source) is None)
    if layout is None and not in_place:
        if settings.get("differential") is not None:
            raise UserError(f"{source} was made differential in place; it stays a {settings['model_type']!r} model")
        titles = "; ".join(f"{name} ({each.title})" for name, each in LAYOUTS.items())
        raise UserError(f"{source} is a {settings.get('model_type')!r} model; accepted: {titles}")
    if layout == target:
        raise UserError(f"{source} is in the layout {target!r} already; give another --to")
    if in_place:
        model, notes = _differentiated(source, target, cast, lambda_init)
    else:
        assert layout is not None
        model: Any = motif.read(source) if layout == "motif" else read_model(source, dtype="auto")
        model.source_facts = source_facts(str(source))
        model, notes_of_target = _converted(model, target, lambda_init, cast)
        model = model.to(cast or model.dtype) if target == PACKAGE else model
        notes = [f"{source}: {LAYOUTS[layout].title}", *notes_of_target]
        if settings.get("attention_dropout"):
            notes.append("attention dropout is left out: differential attention has none")
    with replacing(out) as folder:
        folder.mkdir(parents=True)
        model.save_pretrained(folder)
        return notes + carry_over(source, folder)


def _layout_named(model_type: Any) -> str | None:
    """The layout of models of this type."""
    return next((name for name, layout in LAYOUTS.items() if str(model_type).lower() in layout.model_types), None)


def layout_of(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """The layout of the model in ``folder``, a key of ``LAYOUTS`` or None, and the content of its ``config.json``.

    Raises:
        UserError: if there is no ``config.json``, or the weights are quantised.
    """
    settings = read_settings(folder)
    if settings.get("quantization_config"):
        raise UserError(f"{folder} has quantised weights; take the model before quantisation")
    layout = _layout_named(settings.get("model_type"))
    return layout if settings.get("differential") is None else None, settings


def package_config(folder: Path) -> DiffTransformerConfig | None:
    """The configuration of the model in ``folder`` in this package's layout; None if the model does not convert."""
    layout, settings = layout_of(folder)
    if layout is None:
        return None
    module = LAYOUTS[layout].module
    try:
        config: Any = settings if layout == "motif" else AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return config if module is None else module.to_package(config).config
    except UNREADABLE:  # such as a Llama with biases
        return None


def model_without_weights(folder: Path) -> Any:
    """The model of transformers in ``folder``, on the meta device.

    Raises:
        UserError: if transformers builds no causal language model of its settings.
    """
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except UNREADABLE as error:
        raise UserError(f"{folder}: transformers builds no causal language model of it ({first_line(error)})") from None


def carry_over(source: Path, folder: Path) -> list[str]:
    """Copy tokenizer, generation settings and licence files unchanged; return a note with the names."""
    licences = [path.name for pattern in _LICENCES for path in sorted(source.glob(pattern)) if path.is_file()]
    copied = [name for name in (*_CARRIED, *licences) if (source / name).is_file()]
    copied += [str(path.relative_to(source)) for path in sorted(source.glob("additional_chat_templates/*.jinja"))]
    for name in copied:
        (folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(source / name, folder / name)
    return [f"carried over: {listed(copied)}"] if copied else []


def _differentiated(source: Path, kind: str, dtype: torch.dtype | None, lambda_init: float) -> tuple[Any, list[str]]:
    """The model as ``differentiate`` changes it, in the class that it has, and notes."""
    read(model_without_weights(source))  # raises before the weights are read
    model = read_model(source, dtype="auto" if dtype is None else torch.float32)  # W_O is rounded once, at the end
    before = model.num_parameters()
    after = differentiate(model, kind, lambda_init).num_parameters()
    return model if dtype is None else model.to(dtype), [
        f"{source}: {type(model).__name__}, which stays; import diff_transformer before loading it",
        f"parameters: {before:,} -> {after:,} (+{after / before - 1:.1%})",
    ]
