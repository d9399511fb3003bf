"""Writing a converted model: shard by shard, beside its place, moved there when it is whole."""

import json
import os
import secrets
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from diff_transformer.durable import flush_tree, require_room, require_writable
from diff_transformer.model.convert.plan import Source

SHARD_BYTES = 2 * 10**9
_CARRIED = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "generation_config.json",
)  # fmt: skip
_LICENCES = ("LICENSE*", "LICENCE*", "NOTICE*")


def require_free(out: Path) -> None:
    """Check that a new folder ``out`` can be moved to its place.

    Raises:
        FileExistsError: if ``out`` is a file or a folder that holds anything.
        DiskError: if the folder around it may not be written to.
    """
    require_writable(out.parent)
    if out.is_file():
        raise FileExistsError(f"{out} is a file; choose a folder")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; choose another folder")


@contextmanager
def new_folder(out: Path) -> Generator[Path]:
    """A folder beside ``out`` to write in, which becomes ``out`` if the block ends well and is removed if not.

    A process that is killed leaves ``.NAME.partial-*`` behind, never a half ``out``.

    Raises:
        FileExistsError: if ``out`` is not empty, before the block or after it.
        DiskError: if the folder around it may not be written to.
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
    source: Source,
    folder: Path,
    *,
    shard_bytes: int = SHARD_BYTES,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Write the tensors of ``source`` as ``model.safetensors``, or as shards with an index where they are more than
    ``shard_bytes``; in memory at a time: one shard, and what one tensor is made of.

    ``progress(done, total)`` is called with bytes, after every tensor.
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
    """Copy the tokenizer, the settings of generation and the licence, byte by byte; the names of what there was."""
    licences = [path.name for pattern in _LICENCES for path in sorted(source.glob(pattern)) if path.is_file()]
    copied = [name for name in (*_CARRIED, *licences) if (source / name).is_file()]
    for name in copied:
        shutil.copyfile(source / name, folder / name)
    return copied
