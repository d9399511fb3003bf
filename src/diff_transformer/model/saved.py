"""The folder of a saved model, looked at before anything is built from it: settings, index, headers."""

from collections.abc import Mapping
from pathlib import Path, PurePath

from diff_transformer.checks import first_line, listed, read_json, require_regular

INDEX = "model.safetensors.index.json"
ONLY_SAFETENSORS = (
    "Only safetensors are read, since a pickle can run code. If you trust the file, "
    "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW) writes safetensors; so does, for bare tensors, "
    "safetensors.torch.save_file({name: x.clone() for name, x in torch.load(FILE, weights_only=True, "
    "map_location='cpu').items()}, 'model.safetensors', {'format': 'pt'})"
)
_SINGLE = ("model.safetensors", "adapter_model.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
# Names of sizes in config.json. Each is the length of a tensor's dimension, or less.
_SIZES = (
    "hidden_size", "n_embd", "d_model", "vocab_size", "intermediate_size", "n_inner", "ffn_dim", "num_attention_heads",
    "num_key_value_heads", "n_head", "head_dim", "value_head_dim", "num_experts", "num_local_experts",
)  # fmt: skip
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_PACKED = 16  # times more than a dimension of a quantised tensor may be meant


def read_settings(folder: Path, name: str = "config.json") -> dict | None:
    """Read the JSON object in ``folder / name``; None if there is no such file.

    Raises:
        ValueError: if the file does not hold a JSON object.
    """
    path = folder / name
    if not path.exists():
        return None
    settings = read_json(path, "copy or download it again")
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds a {type(settings).__name__}; expected a JSON object with the model's settings")
    return settings


def indexed_files(folder: Path) -> list[Path] | None:
    """The files that the index of shards in ``folder`` names; None without an index.

    Raises:
        ValueError: for an index that is none, or one that names anything but safetensors inside the folder.
        FileNotFoundError: if files are missing.
    """
    index = folder / INDEX
    if not index.exists():
        return None
    try:
        content = read_json(index)
        names = sorted({*map(str, content["weight_map"].values())})
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is not an index of shards ({error!r}); copy or download it again") from None
    if "metadata" not in content:
        raise ValueError(f'{index} has no "metadata", which transformers needs; add the line "metadata": {{}},')
    outside = [name for name in names if PurePath(name).is_absolute() or ".." in PurePath(name).parts]
    if outside:
        raise ValueError(f"{index} names {listed(outside)}, which is outside the folder; it may name files inside only")
    wrong = [name for name in names if not name.endswith(".safetensors")]
    if wrong:
        raise ValueError(f"{index} names {', '.join(wrong)}. {ONLY_SAFETENSORS}")
    lost = [name for name in names if not (folder / name).exists()]
    if lost:
        raise FileNotFoundError(
            f"{folder} lacks {len(lost)} of the {len(names)} files its index names: {listed(lost)}; copy or download "
            "them again"
        )
    return [folder / name for name in names]


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: indexed shards, ``model.safetensors``, or a LoRA adapter's.

    transformers and the conversions read these files and no others.

    Raises:
        ValueError: for two sets of weights, for weights that only a pickle holds, for an invalid index.
        FileNotFoundError: if there are no weights, or files that the index names are missing.
    """
    shards, singles = indexed_files(folder), [folder / name for name in _SINGLE if (folder / name).exists()]
    if shards and folder / _SINGLE[0] in singles:
        raise ValueError(f"{folder} holds two sets of weights, {_SINGLE[0]} and the shards of {INDEX}; remove one")
    if files := shards or singles[:1]:
        return files
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        raise FileNotFoundError(
            f"{folder} holds {listed(others)}, but neither {_SINGLE[0]} nor {INDEX}; rename the file, or copy the index"
        )
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)} - {"training_args.bin"})
    if pickles:
        raise ValueError(f"{folder} holds {listed(pickles)} but no .safetensors file. {ONLY_SAFETENSORS}")
    require_no_gguf(folder)
    raise FileNotFoundError(f"{folder} holds no .safetensors file; give the folder of a saved model")


def require_no_gguf(path: Path) -> None:
    """Raise ValueError if ``path`` is a GGUF file, or a folder with one."""
    found = next(iter([path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))), None)
    if found is not None:
        raise ValueError(
            f"{found} is GGUF, which is not read here; write its weights as safetensors first, as "
            "docs/pretrained_to_diff.md shows"
        )


def check_sizes(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Compare the sizes in ``config.json`` with the shapes of the tensors, so that nothing beyond them is allocated.

    What fits roughly passes: loading compares every shape.

    Raises:
        ValueError: for more layers than tensors, a size above every dimension, or an unknown dtype.
    """
    settings, path = read_settings(folder) or {}, folder / "config.json"
    _check_dtype(settings, path)
    inner = settings.get("text_config")
    settings = {**settings, **(inner if isinstance(inner, dict) else {})}
    for name in _LAYERS:
        value = settings.get(name)
        if isinstance(value, int) and value > len(shapes) > 0:
            raise ValueError(f"{path}: {name} is {value:,}, and the safetensors beside it hold {len(shapes):,} tensors")
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    most = largest * (_PACKED if "quantization_config" in settings else 1)
    for name in _SIZES:
        value = settings.get(name)
        if isinstance(value, int) and value > most > 0:
            raise ValueError(
                f"{path}: {name} is {value:,}, and the largest dimension of the safetensors beside it is {largest:,}; "
                "give the config.json, and all the files, that the model was saved with"
            )


def _check_dtype(settings: Mapping, path: Path) -> None:
    import torch

    for name in ("dtype", "torch_dtype"):
        value = settings.get(name)
        if value in (None, "auto") or isinstance(value, dict):
            continue
        kind = getattr(torch, value.removeprefix("torch."), None) if isinstance(value, str) else None
        if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
            raise ValueError(
                f"{path}: {name} is {value!r}; accepted: float32, bfloat16, float16 and other PyTorch dtypes"
            )


def shapes_of_files(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of all tensors in the safetensors of ``folder``, from their headers.

    Raises:
        ValueError: for a damaged file, and as ``weight_files``.
    """
    from safetensors import SafetensorError, safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (a handle is no mapping)
                    shapes[name] = tuple(file.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from None
    return shapes


def unreadable(path: Path, error: Exception) -> ValueError:
    """The error for a truncated or otherwise damaged safetensors file."""
    return ValueError(f"{path} cannot be read as safetensors ({first_line(error)}); copy or download it again")


def check_files(folder: Path) -> None:
    """Refuse pipes and devices in ``folder``, and settings that are not JSON.

    Raises:
        ValueError: for the first one.
    """
    require_regular(*sorted(folder.iterdir()))
    for name in ("config.json", "generation_config.json", "adapter_config.json"):
        read_settings(folder, name)
