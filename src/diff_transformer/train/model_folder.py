"""The finished model in Hugging Face's format, whole or not there."""

import errno
from pathlib import Path

from diff_transformer.durable import DiskError, explained, replacing, require_room
from diff_transformer.train.snapshot import state_bytes


def save_model(model, tokenizer, folder: Path) -> None:
    """Write model and tokenizer to ``folder``, beside it first; what was there is replaced in one step.

    Raises:
        DiskError: if it cannot be written; what was there is intact, and so is the run's last checkpoint.
    """
    needed = state_bytes({"model": model})
    try:
        with replacing(folder) as partial:
            require_room(folder.parent, needed, "the model")
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    except Exception as error:
        if not isinstance(error, DiskError):
            error = explained(error, folder.parent, needed, "the model")
        raise DiskError(
            error.errno or errno.EIO, f"{error.strerror}; the checkpoints are intact: make room, then --resume"
        ) from error
