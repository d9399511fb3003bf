"""The finished model in Hugging Face's format, whole or not there."""

import errno
import os
from pathlib import Path

from diff_transformer.durable import DiskError, explained, flush_folder, flush_tree, remove, require_room
from diff_transformer.train.snapshot import state_bytes


def save_model(model, tokenizer, folder: Path) -> None:
    """Write model and tokenizer to ``folder``, beside it first; what was there is replaced in one step.

    Raises:
        DiskError: if it cannot be written; what was there is intact, and so is the run's last checkpoint.
    """
    partial, old = folder.with_name(folder.name + ".partial"), folder.with_name(folder.name + ".old")
    needed = state_bytes({"model": model})
    try:
        remove(partial)
        require_room(folder.parent, needed, "the model")
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        flush_tree(partial)
        if folder.exists():
            remove(old)
            os.replace(folder, old)
        os.replace(partial, folder)
        flush_folder(folder.parent)
        remove(old)
    except Exception as error:
        remove(partial)
        if not isinstance(error, DiskError):
            error = explained(error, folder.parent, needed, "the model")
        raise DiskError(
            error.errno or errno.EIO, f"{error.strerror}; the checkpoints are intact: make room, then --resume"
        ) from error
