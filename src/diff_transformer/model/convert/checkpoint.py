"""Reading the folder of a model: its configuration and its safetensors files, one tensor at a time; never a pickle."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from diff_transformer.checks import listed
from diff_transformer.model.convert.plan import Shapes
from diff_transformer.model.loading import unreadable

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


class Checkpoint:
    """The tensors of a folder, a ``Source``: ``model.safetensors``, shards with an index, or any ``*.safetensors``.

    Only headers are read at first; a tensor is read from its file when it is asked for.

    Raises:
        FileNotFoundError: if ``folder`` is no folder, holds no safetensors, or lacks a shard that its index names.
        ValueError: if all there is are pickles, or a file is damaged, or tensors are not floating point (quantised).
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder} is not a folder; give the folder of a saved model")
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._shapes: Shapes = {}
        self._dtypes: dict[str, str] = {}
        self._open = {}
        for path in _files(folder):
            self._read_header(path)
        self._check_dtypes()

    def _read_header(self, path: Path):
        try:
            handle = safe_open(path, framework="pt")
        except (SafetensorError, OSError) as error:
            raise unreadable(path, error) from None
        self._open[path] = handle
        for name in handle.keys():  # noqa: SIM118  (a handle is no mapping)
            if name in self._file_of:
                raise ValueError(f"{name} is in {self._file_of[name].name} and in {path.name}; keep one of them")
            view = handle.get_slice(name)
            self._file_of[name] = path
            self._shapes[name] = tuple(view.get_shape())
            self._dtypes[name] = view.get_dtype()

    def _check_dtypes(self):
        others = [f"{name} ({dtype})" for name, dtype in self._dtypes.items() if dtype not in _DTYPES]
        if others:
            raise ValueError(
                f"{self.folder} holds {len(others)} tensors that are not fp64, fp32, fp16 or bf16: {listed(others)}; "
                "a quantised checkpoint cannot be converted, take the one it was made of"
            )

    def shapes(self) -> Shapes:
        return self._shapes

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._dtypes[name]]

    def tensor(self, name: str) -> Tensor:
        return self._open[self._file_of[name]].get_tensor(name)


def read_settings(folder: Path, name: str = "config.json") -> dict | None:
    """The JSON object in ``folder / name``, or None where there is no such file.

    Raises:
        ValueError: if it is no JSON object.
    """
    path = folder / name
    if not path.exists():
        return None
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} holds a {type(settings).__name__}; expected a JSON object with the model's settings")
    return settings


def _files(folder: Path) -> list[Path]:
    index = read_settings(folder, "model.safetensors.index.json")
    if index is not None:
        shards = sorted({folder / shard for shard in index.get("weight_map", {}).values()})
        missing = [shard.name for shard in shards if not shard.exists()]
        if missing:
            raise FileNotFoundError(
                f"{folder} lacks {len(missing)} of the {len(shards)} files its index names: {listed(missing)}"
            )
        return shards
    if (folder / "model.safetensors").exists():
        return [folder / "model.safetensors"]
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        _refuse_without(folder)
    return files


def _refuse_without(folder: Path):
    pickles = sorted({path.name for pattern in _PICKLES for path in folder.glob(pattern)})
    if not pickles:
        raise FileNotFoundError(f"{folder} holds no .safetensors file; give the folder of a saved model")
    raise ValueError(
        f"{folder} holds {listed(pickles)} but no .safetensors file. Only safetensors are read: loading a pickle can "
        "run code that came with it. To make safetensors of one: "
        "torch.load(FILE, weights_only=True, map_location='cpu'), then safetensors.torch.save_file(tensors, "
        "'model.safetensors'); or AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW)"
    )
