"""The folder of a saved model: its settings, and the files with its weights, of which there is one set."""

from pathlib import Path, PurePath

from diff_transformer.checks import first_line, listed, read_json
from diff_transformer.errors import UserError

INDEX = "model.safetensors.index.json"
_SINGLE = ("model.safetensors", "adapter_model.safetensors")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle")
_ONLY_SAFETENSORS = (
    "Only safetensors are read, since a pickle can run code. If you trust the file, "
    "AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW) writes safetensors; so does, for bare tensors, "
    "safetensors.torch.save_file({name: x.clone() for name, x in torch.load(FILE, weights_only=True, "
    "map_location='cpu').items()}, 'model.safetensors', {'format': 'pt'})"
)


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
        raise UserError(f"{path} holds a {type(settings).__name__}; expected a JSON object with the model's settings")
    return settings


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: indexed shards, ``model.safetensors``, or a LoRA adapter's.

    transformers and the conversions read these files and no others.

    Raises:
        ValueError: for two sets of weights, for weights that only a pickle holds, for an invalid index.
        FileNotFoundError: if there are no weights, or files that the index names are missing.
    """
    shards, singles = _indexed_files(folder), [folder / name for name in _SINGLE if (folder / name).exists()]
    if shards and folder / _SINGLE[0] in singles:
        raise UserError(f"{folder} holds two sets of weights, {_SINGLE[0]} and the shards of {INDEX}; remove one")
    if files := shards or singles[:1]:
        return files
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    if others:
        raise UserError(
            f"{folder} holds {listed(others)}, but neither {_SINGLE[0]} nor {INDEX}; rename the file, or copy the index"
        )
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)} - {"training_args.bin"})
    if pickles:
        raise UserError(f"{folder} holds {listed(pickles)} but no .safetensors file. {_ONLY_SAFETENSORS}")
    require_no_gguf(folder)
    raise UserError(f"{folder} holds no .safetensors file; give the folder of a saved model")


def _indexed_files(folder: Path) -> list[Path] | None:
    """The files that the index of shards in ``folder`` names; None without an index."""
    index = folder / INDEX
    if not index.exists():
        return None
    content = read_settings(folder, INDEX) or {}
    if not isinstance(content.get("weight_map"), dict):
        raise UserError(f"{index} is not an index of shards (it has no weight_map); copy or download it again")
    if "metadata" not in content:
        raise UserError(f'{index} has no "metadata", which transformers needs; add the line "metadata": {{}},')
    names = sorted({*map(str, content["weight_map"].values())})
    outside = [name for name in names if PurePath(name).is_absolute() or ".." in PurePath(name).parts]
    if outside:
        raise UserError(f"{index} names {listed(outside)}, which is outside the folder; it may name files inside only")
    wrong = [name for name in names if not name.endswith(".safetensors")]
    if wrong:
        raise UserError(f"{index} names {', '.join(wrong)}. {_ONLY_SAFETENSORS}")
    lost = [name for name in names if not (folder / name).exists()]
    if lost:
        raise UserError(
            f"{folder} lacks {len(lost)} of the {len(names)} files its index names: {listed(lost)}; copy or download "
            "them again"
        )
    return [folder / name for name in names]


def require_no_gguf(path: Path) -> None:
    """Raise ValueError if ``path`` is a GGUF file, or a folder with one."""
    gguf = next(iter([path] if path.suffix == ".gguf" else sorted(path.glob("*.gguf"))), None)
    if gguf is not None:
        raise UserError(
            f"{gguf} is GGUF, which is not read here; write its weights as safetensors first, as "
            "docs/pretrained_to_diff.md shows"
        )


def unreadable(path: object, error: Exception) -> ValueError:
    """The error for a truncated or otherwise damaged safetensors file."""
    return ValueError(f"{path} cannot be read as safetensors ({first_line(error)}); copy or download it again")
