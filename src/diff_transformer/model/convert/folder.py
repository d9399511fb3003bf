"""Convert the model in a folder to another layout, in a new folder: what ``diff-transformer convert`` calls.

Every layout's module reads to this package's model, and most write from it, so that layouts convert to one another.
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
from diff_transformer.model.convert.conversion import convert_model
from diff_transformer.model.convert.from_softmax import to_differential
from diff_transformer.model.differentiate import KINDS, check_start, differentiate, read, start_of
from diff_transformer.model.loading import DTYPES, read_model, read_settings
from diff_transformer.model.modeling import DiffTransformerForCausalLM

PACKAGE = "diff-transformer"
_CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "generation_config.json",
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
TARGETS = (PACKAGE, "llama", "diffllama", *KINDS)


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
            logits. A decoder that no layout holds then keeps its class (``differentiate``).
        dtype: dtype of the written tensors except lambda vectors: "float32", "bfloat16" or "float16"; None keeps that
            of the source.
        lambda_init: initial lambda with ``target`` "diff", between 0 and 1.

    Returns:
        Notes for the user: the layout of the source, what was folded, which files were copied.

    Raises:
        UserError: for unknown names, a folder without a model, a model that cannot be represented in the target, or an
            ``out`` that is not empty.
    """
    source, out = Path(source), Path(out)
    require_known("target", target, TARGETS)
    if target in KINDS:
        check_start(target, lambda_init)
    if dtype is not None:
        require_known("dtype", dtype, DTYPES)
    cast = None if dtype is None else getattr(torch, dtype)
    require_writable(out.parent)
    if out.is_file() or (out.exists() and any(out.iterdir())):
        raise UserError(f"{out} exists already; choose a new folder")
    layout, settings = layout_of(source)
    in_place, write = target in KINDS and package_config(source) is None, None
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
        model, notes = _read(source, layout), [f"{source}: {LAYOUTS[layout].title}"]
        if target in KINDS:
            conversion = to_differential(model.config, target, lambda_init)
            model = convert_model(conversion, DiffTransformerForCausalLM, model, cast)
            notes += conversion.notes
        else:
            write = LAYOUTS[target].module
    with replacing(out) as folder:
        folder.mkdir(parents=True)
        if write is not None:
            notes += write.write(model, folder, cast)
        else:
            (model if in_place else model.to(cast or model.dtype)).save_pretrained(folder)
        return notes + carry_over(source, folder)


def _read(source: Path, layout: str) -> DiffTransformerForCausalLM:
    """The model of a folder in this package's class."""
    module = LAYOUTS[layout].module
    model = read_model(source, DiffTransformerForCausalLM, dtype="auto") if module is None else module.read(source)
    model.source_facts = source_facts(str(source))
    return model


def layout_of(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """The layout of the model in ``folder``, a key of ``LAYOUTS`` or None, and the content of its ``config.json``.

    Raises:
        UserError: if there is no ``config.json``, or the weights are quantised.
    """
    settings = read_settings(folder)
    if settings.get("quantization_config"):
        raise UserError(f"{folder} has quantised weights; take the model before quantisation")
    model_type = str(settings.get("model_type")).lower()
    names = [name for name, layout in LAYOUTS.items() if model_type in layout.model_types]
    return names[0] if names and settings.get("differential") is None else None, settings


def package_config(folder: Path) -> DiffTransformerConfig | None:
    """The configuration of the model in ``folder`` in this package's layout; None if the model does not convert."""
    layout, settings = layout_of(folder)
    if layout is None:
        return None
    config: Any = settings if layout == "motif" else AutoConfig.from_pretrained(folder, trust_remote_code=False)
    module = LAYOUTS[layout].module
    try:
        return config if module is None else module.to_package(config).config
    except UserError:  # such as a Llama with biases
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
    except (OSError, ValueError) as error:
        raise UserError(f"{folder}: transformers builds no causal language model of it ({first_line(error)})") from None


def carry_over(source: Path, folder: Path) -> list[str]:
    """Copy tokenizer, generation settings and licence files unchanged; return a note with the names."""
    licences = [path.name for pattern in _LICENCES for path in sorted(source.glob(pattern)) if path.is_file()]
    copied = [name for name in (*_CARRIED, *licences) if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, folder / name)
    return [f"carried over: {listed(copied)}"] if copied else []


def _differentiated(source: Path, kind: str, dtype: torch.dtype | None, lambda_init: float) -> tuple[Any, list[str]]:
    """The model as ``differentiate`` changes it, in the class that it has, and notes."""
    read(model_without_weights(source))  # raises before the weights are read
    model = read_model(source, dtype=dtype or "auto")
    before = model.num_parameters()
    after = differentiate(model, kind, lambda_init).num_parameters()
    return model, [
        f"{source}: {type(model).__name__}, which stays; import diff_transformer before loading it",
        f"parameters: {before:,} -> {after:,} (+{after / before - 1:.1%}); {start_of(kind, lambda_init)}",
    ]
