"""The folder of a model: read its configuration and safetensors tensor by tensor (never a pickle), write a new one."""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diff_transformer.checks import listed
from diff_transformer.durable import flush_tree, require_room, require_writable
from diff_transformer.errors import UserError
from diff_transformer.model.convert.plan import Shapes, TensorSource
from diff_transformer.model.saved import require_no_gguf, unreadable, weight_files

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
SHARD_BYTES = 2 * 10**9
_CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")


class Checkpoint:
    """The tensors of a folder as a ``TensorSource``: ``model.safetensors``, indexed shards, or any ``*.safetensors``.

    The constructor reads headers only; ``tensor`` reads one tensor from its file.

    Raises:
        FileNotFoundError: if ``folder`` is not a folder, has no safetensors, or lacks a shard that its index names.
        ValueError: if the weights are pickles, a file is damaged, or tensors are not floating point (quantised).
    """

    def __init__(self, folder: Path):
        if not folder.is_dir():
            require_no_gguf(folder)
            raise UserError(f"{folder} is not a folder; give the folder of a saved model")
        self.folder = folder
        self._file_of: dict[str, Path] = {}
        self._shapes: Shapes = {}
        self._dtypes: dict[str, str] = {}
        self._open = {}
        for path in weight_files(folder):
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
                raise UserError(f"{name} is in {self._file_of[name].name} and in {path.name}; keep one of them")
            view = handle.get_slice(name)
            self._file_of[name] = path
            self._shapes[name] = tuple(view.get_shape())
            self._dtypes[name] = view.get_dtype()

    def _check_dtypes(self):
        others = [f"{name} ({dtype})" for name, dtype in self._dtypes.items() if dtype not in _DTYPES]
        if others:
            raise UserError(
                f"{self.folder} holds {len(others)} tensors that are not fp64, fp32, fp16 or bf16: {listed(others)}; "
                "a quantised checkpoint cannot be converted, take the one it was made of"
            )

    def shapes(self) -> Shapes:
        return self._shapes

    def dtype(self, name: str) -> torch.dtype:
        return _DTYPES[self._dtypes[name]]

    def tensor(self, name: str) -> Tensor:
        return self._open[self._file_of[name]].get_tensor(name)


def require_free(out: Path) -> None:
    """Check that a new folder can be moved to ``out``.

    Raises:
        FileExistsError: if ``out`` is a file or a folder that is not empty.
        DiskError: if the folder around it is not writable.
    """
    require_writable(out.parent)
    if out.is_file():
        raise UserError(f"{out} is a file; choose a folder")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; choose another folder")


@contextmanager
def new_folder(out: Path) -> Generator[Path]:
    """Context manager: a temporary folder beside ``out``, renamed to ``out`` on success and removed on an error.

    A killed process leaves ``.NAME.partial-*`` behind, never an incomplete ``out``.

    Raises:
        FileExistsError: if ``out`` is not empty, before or after the block.
        DiskError: if the folder around it is not writable.
    """
    require_free(out)
    partial = out.absolute().with_name(f".{out.absolute().name}.partial-{secrets.token_hex(4)}")
    partial.mkdir(parents=True)
    try:
        yield partial
        flush_tree(partial)
        require_free(out)
        if out.exists():
            out.rmdir()
        os.rename(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_tensors(
    source: TensorSource,
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the tensors of ``source`` as ``model.safetensors``, or as indexed shards of at most ``shard_bytes`` each.

    Memory holds one shard and the sources of one tensor at a time. ``progress(done, total)`` gets bytes after each
    tensor.
    """
    sizes = {
        name: torch.empty(shape, dtype=source.dtype(name), device="meta") for name, shape in source.shapes().items()
    }
    split = split_torch_state_dict_into_shards(sizes, max_shard_size=shard_bytes)
    total, done = sum(x.nbytes for x in sizes.values()), 0
    require_room(folder, total, "the converted model")
    for file, names in split.filename_to_tensors.items():
        shard = {}
        for name in names:
            shard[name] = source.tensor(name)
            done += shard[name].nbytes
            if progress is not None:
                progress(done, total)
        save_file(shard, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")


def carry_over(source: Path, folder: Path) -> list[str]:
    """Copy tokenizer, generation settings and licence files unchanged; return the names of the copied files."""
    licences = [path.name for pattern in _LICENCES for path in sorted(source.glob(pattern)) if path.is_file()]
    copied = [name for name in (*_CARRIED, *licences) if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, folder / name)
    return copied
