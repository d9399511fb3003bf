"""Convert the model in a folder to another layout, in a new folder: what ``diff-transformer convert`` calls."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError

from diff_transformer.checks import first_line, listed
from diff_transformer.durable import require_room
from diff_transformer.errors import UserError
from diff_transformer.model.card import source_facts, write_card
from diff_transformer.model.convert.checkpoint import (
    SHARD_BYTES,
    Checkpoint,
    carry_over,
    new_folder,
    require_free,
    write_tensors,
)
from diff_transformer.model.convert.layouts import DIRECT, LAYOUTS, PACKAGE, by_names, direct, layout_of, targets
from diff_transformer.model.convert.plan import BUFFERS, Conversion, Planned, TensorSource, check_tensors
from diff_transformer.model.saved import read_settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def convert_folder(
    source: Path | str,
    out: Path | str,
    origin: str | None = None,
    target: str = PACKAGE,
    *,
    dtype: str | torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
    **options,
) -> list[str]:
    """Convert the model in ``source`` and write it, with its tokenizer if it has one, to the new folder ``out``.

    Memory holds one shard and the sources of one tensor at a time. ``out`` appears when it is complete; nothing is
    overwritten.

    Args:
        source: folder with safetensors and the model's settings.
        out: new folder for the converted model.
        origin: layout of ``source``; None detects it.
        target: layout to write; ``layouts.targets()`` lists them.
        dtype: dtype of the written tensors except lambda vectors: a name of ``DTYPES`` or a torch dtype; None keeps
            that of the source.
        progress: called with (bytes done, total bytes).
        options: passed on to a direct conversion (``layouts.DIRECT``), or to ``differentiate``.

    With ``target`` "diff" or "diff_v2", a decoder that no layout holds keeps its own class (``differentiate``). It is
    loaded as a whole.

    Returns:
        Notes for the user: the detected layout, what was folded, which files were copied.

    Raises:
        ValueError: for unknown layouts, or a checkpoint that does not have the layout or cannot be represented in the
            target.
        FileNotFoundError, FileExistsError: if ``source`` is not the folder of a model, or ``out`` is not empty.
        DiskError: if the folder around ``out`` is not writable or the disk is full.
    """
    _check_names(origin, target)
    source, out, cast = Path(source), Path(out), _dtype(dtype)
    checkpoint = Checkpoint(source)
    require_free(out)
    if origin is None and target not in LAYOUTS and _is_foreign(checkpoint):
        _check_options(options, {"lambda_init"}, "a model that keeps its class", target)
        return _in_place(checkpoint, out, target, cast, shard_bytes, progress, **options)
    found = layout_of(checkpoint)
    origin = origin or found
    if origin != found:
        raise UserError(
            f"{source} is {LAYOUTS[found].title}, not {LAYOUTS[origin].title}; give --from {found}, or leave it out"
        )
    other = direct(origin, target)
    if other is None and target not in LAYOUTS:
        starts = " or ".join(start for start, to in DIRECT if to == target)
        raise UserError(f"cannot convert from {origin!r} to {target!r}; --to {target} is for {starts}")
    parameters = {} if other is None else signature(other).parameters
    known = {name for name, parameter in parameters.items() if parameter.kind is Parameter.KEYWORD_ONLY}
    _check_options(options, known, repr(origin), target)
    if origin == target:
        raise UserError(f"{source} is in the layout {target!r} already; give another --to: {_others(origin)}")
    notes = [f"{source}: {LAYOUTS[origin].title}"]
    made = None if other is None else partial(other, **options)
    converted, config = _convert(checkpoint, origin, target, cast, notes, made)
    with new_folder(out) as folder:
        write_tensors(converted, folder, shard_bytes=shard_bytes, progress=progress)
        LAYOUTS[target if other is None else PACKAGE].load().write_config(config, folder, _main_dtype(converted))
        if target == PACKAGE or other is not None:
            write_card(config, folder, "DiffTransformerForCausalLM", source=source_facts(str(source)))
        carried = carry_over(source, folder)
    return notes + ([f"carried over: {listed(carried)}"] if carried else [])


def _is_foreign(checkpoint: Checkpoint) -> bool:
    """True if no layout holds the model, which transformers may know."""
    try:
        origin = layout_of(checkpoint)
        if origin == "llama":
            LAYOUTS[origin].load().to_package(LAYOUTS[origin].load().read_config(checkpoint))
    except ValueError:  # of another architecture, or a Llama with biases
        return "model_type" in (read_settings(checkpoint.folder) or {})
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError, OSError):
        pass  # settings that describe no model, which the layout reports
    return False


def _in_place(
    checkpoint: Checkpoint,
    out: Path,
    kind: str,
    dtype: torch.dtype | None,
    shard_bytes: int,
    progress: Callable[[int, int], None] | None,
    lambda_init: float = 0.5,
) -> list[str]:
    """Write the model as ``differentiate`` makes it, in the class that it has."""
    from diff_transformer.model.differentiate import differentiate
    from diff_transformer.model.loading import read_model

    source = checkpoint.folder
    without_weights = on_meta(checkpoint)
    before = without_weights.num_parameters()
    after = differentiate(without_weights, kind, lambda_init).num_parameters()
    model = differentiate(read_model(source, dtype=dtype or "auto"), kind, lambda_init)
    size = sum(x.nbytes for x in model.state_dict().values())
    with new_folder(out) as folder:
        require_room(folder, size, "the converted model")
        model.save_pretrained(folder, max_shard_size=shard_bytes)
        carried = carry_over(source, folder)
    if progress is not None:
        progress(size, size)
    notes = [
        f"{source}: {type(model).__name__}, which stays; import diff_transformer before loading it",
        f"parameters: {before:,} -> {after:,} (+{after / before - 1:.1%}); lambda starts at {lambda_init:g}",
    ]
    return notes + ([f"carried over: {listed(carried)}"] if carried else [])


def _refusal(checkpoint: Checkpoint) -> str:
    """Why the model in the folder cannot be differential in its own class; "" if it can."""
    from diff_transformer.model.differentiate import read

    try:
        read(on_meta(checkpoint))
    except ValueError as error:
        return first_line(error)
    return ""


def on_meta(checkpoint: Checkpoint) -> Any:
    """The model of transformers without its weights.

    Raises:
        ValueError: if transformers builds no causal language model of its settings, or one of another embedding.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    import diff_transformer.model.modeling  # noqa: F401  (registers our models)

    try:
        config = AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=False)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception as error:  # of any kind, from settings that describe no model
        raise UserError(
            f"{checkpoint.folder}: transformers builds no causal language model of it ({first_line(error)})"
        ) from None
    embedding = model.get_input_embeddings().weight
    name = next(name for name, x in model.named_parameters() if x is embedding)
    found = [shape for other, shape in checkpoint.shapes().items() if name.endswith(other) or other.endswith(name)]
    if tuple(embedding.shape) not in found:
        raise UserError(
            f"{checkpoint.folder} holds no {name} of shape {tuple(embedding.shape)}, as its config.json says"
        )
    return model


@dataclass(frozen=True)
class Convertible:
    """The content of a model's folder, and its conversions.

    Attributes:
        checkpoint: its tensors.
        origin: its layout, a key of ``LAYOUTS``; None if it has none of them.
        config: in this package's layout; None if it does not convert.
        reasons: why it does not convert, by target; "" where it does.
    """

    checkpoint: Checkpoint
    origin: str | None
    config: Any
    reasons: dict[str, str]


def convertible(source: Path) -> Convertible:
    """The conversions of the model in ``source``. Its tensors are not read, so a damaged one is not noticed.

    Raises:
        FileNotFoundError, ValueError: as ``Checkpoint``.
    """
    checkpoint = Checkpoint(source)
    try:
        origin = layout_of(checkpoint)
        found = LAYOUTS[origin].load().read_config(checkpoint)
        config = found if origin == PACKAGE else LAYOUTS[origin].load().to_package(found).config
    except (ValueError, StrictDataclassError, KeyError, TypeError, FileNotFoundError) as error:
        reasons = dict.fromkeys(targets(), first_line(error).partition("; accepted: ")[0])
        if _is_foreign(checkpoint):
            reasons |= dict.fromkeys((target for target in reasons if target not in LAYOUTS), _refusal(checkpoint))
        return Convertible(checkpoint, None, None, reasons)
    reasons = {}
    for target in targets():
        if target in (origin, PACKAGE):
            continue
        try:
            made = direct(origin, target)
            if made is None and target not in LAYOUTS:
                raise UserError("it is for softmax models")
            (made or LAYOUTS[target].load().from_package)(config)
            reasons[target] = ""
        except ValueError as error:
            reasons[target] = first_line(error)
    return Convertible(checkpoint, origin, config, reasons if origin == PACKAGE else {PACKAGE: "", **reasons})


def _convert(
    checkpoint: Checkpoint,
    origin: str,
    target: str,
    dtype: torch.dtype | None,
    notes: list[str],
    made: Callable[..., Conversion] | None,
) -> tuple[TensorSource, object]:
    if not (checkpoint.folder / "config.json").exists():
        raise UserError(
            f"{checkpoint.folder} has the tensors of {LAYOUTS[origin].title}, but no config.json; put it there"
        )
    layout = LAYOUTS[origin].load()
    try:
        config = layout.read_config(checkpoint)
        expected = layout.tensors(config)
    except (StrictDataclassError, ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise UserError(
            f"{checkpoint.folder / 'config.json'} does not describe {LAYOUTS[origin].title}: "
            f"{type(error).__name__}: {error}"
        ) from error
    _check(checkpoint, expected, origin)
    source: TensorSource = checkpoint
    steps = [] if origin == PACKAGE else [(layout.to_package, PACKAGE)]
    if made is not None:
        steps.append((made, PACKAGE))
    elif target != PACKAGE:
        steps.append((LAYOUTS[target].load().from_package, target))
    for step, (convert, name) in enumerate(steps, 1):
        conversion: Conversion = convert(config)
        config, shapes = conversion.config, LAYOUTS[name].load().tensors(conversion.config)
        assert set(conversion.plan) == set(shapes), sorted(set(conversion.plan) ^ set(shapes))
        source = Planned(source, conversion.plan, shapes, dtype if step == len(steps) else None)
        notes += conversion.notes
    return source, config


def _check(checkpoint: Checkpoint, expected: dict, origin: str):
    found = checkpoint.shapes()
    ignored = [name for name in found if name.endswith(BUFFERS)]
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if head in found and head not in expected and embedding in found:
        if not torch.equal(checkpoint.tensor(head), checkpoint.tensor(embedding)):
            raise UserError(
                f"{checkpoint.folder}: tie_word_embeddings is true, but {head} is not {embedding}; set it to false in "
                "config.json if the head is one of its own"
            )
        ignored.append(head)
    try:
        check_tensors(found, expected, ignored, LAYOUTS[origin].title)
    except ValueError as error:
        like = by_names(found)
        hint = f"\n  by their names they are {LAYOUTS[like].title}" if like not in (None, origin) else ""
        raise UserError(f"{checkpoint.folder}: {error}{hint}") from None


def _check_names(origin: str | None, target: str):
    if (origin is None or origin in LAYOUTS) and target in targets():
        return
    origins = " or ".join(LAYOUTS)
    raise UserError(
        f"cannot convert {f'from {origin!r} ' if origin else ''}to {target!r}; accepted: from {origins}; to "
        f"{' or '.join(targets())}"
    )


def _check_options(options: dict, known: set[str], origin: str, target: str):
    unknown = sorted(set(options) - known)
    if unknown:
        accepted = ", ".join(sorted(known)) or "none"
        raise UserError(
            f"{', '.join(unknown)}: not for a conversion from {origin} to {target!r}; leave it out "
            f"(options: {accepted})"
        )


def _dtype(name: str | torch.dtype | None) -> torch.dtype | None:
    if isinstance(name, str):
        if name not in DTYPES:
            raise UserError(f"dtype is {name!r}; accepted: {', '.join(DTYPES)}")
        return DTYPES[name]
    return name


def _others(origin: str) -> str:
    direct_targets = [to for start, to in DIRECT if start == origin]
    return ", ".join(name for name in targets() if name != origin and (name in LAYOUTS or name in direct_targets))


def _main_dtype(source: TensorSource) -> torch.dtype:
    """The dtype of most elements."""
    counts = Counter()
    for name, shape in source.shapes().items():
        counts[source.dtype(name)] += torch.Size(shape).numel()
    return counts.most_common(1)[0][0]
