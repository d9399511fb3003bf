"""The folder of a run: never overwritten, used by one process (or one group of ranks) at a time.

It holds ``config.json``, ``metrics.jsonl``, ``checkpoints/`` and, at the end, ``model/`` in Hugging Face's format.
"""

import errno
import json
import logging
import os
import platform
import re
from pathlib import Path

from filelock import FileLock, Timeout

from diff_transformer.checks import differences, listed, read_json
from diff_transformer.durable import DiskError, explained, replacing, require_room, require_writable
from diff_transformer.errors import UserError
from diff_transformer.model.card import label_of, write_card
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.loading import read_settings, read_tensors
from diff_transformer.train.config import RunConfig
from diff_transformer.train.state import state_bytes

logger = logging.getLogger("diff_transformer")

LOCK = "run.lock"
_NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}  # of file systems without locks
_OURS = {LOCK, "train.log"}
# Settings that a resumed run may change: they affect results by rounding at most. evaluation.seed draws held-out rows.
_FREE = re.compile(
    r"evaluation\.(?!seed:)|train\.(checkpoint_\w+|parallel\.\w+|prefetch|peak_flops|accumulate|micro_batch_size|loss_chunk"
    r"|activation_checkpointing|compile|threads|log_every|validate_every|wandb):"
)


def changes_results(there: dict, here: dict) -> list[str]:
    """The settings in which two configurations differ that change results by more than rounding, a line each."""
    return [line for line in differences(there, here) if not _FREE.match(line)]


class RunLock:
    """The lock of a folder, for one process at a time. The operating system releases it when the process ends.

    Where the file system has no locks, a warning says so.

    Raises:
        DiskError: if another process holds the lock, naming that process.
        OSError: if the lock file cannot be created.
    """

    def __init__(self, folder: Path):
        path = folder / LOCK
        self._lock = FileLock(path, timeout=0, thread_local=False, fallback_to_soft=False, on_acquired=_write_owner)
        try:
            self._lock.acquire()
        except Timeout:
            raise DiskError(
                errno.EBUSY, f"{folder} is in use by {_owner(path)}; wait for it, stop it, or choose another --out"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning("%s cannot be locked (%s): let no other process train in it", folder, error.strerror)

    def release(self) -> None:
        self._lock.release()

    def __enter__(self) -> "RunLock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _write_owner(lock_file: int) -> None:
    os.ftruncate(lock_file, 0)
    os.write(lock_file, f"process {os.getpid()} on {platform.node()}\n".encode())


def _owner(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() or "an unknown process"
    except OSError:  # Windows does not let another process read a locked file
        return "an unknown process"


def check_run_folder(folder: Path, *, resume: bool) -> None:
    """Check that ``folder`` can be the folder of a run, before anything is loaded. Writes nothing.

    Raises:
        FileExistsError: if the folder is not empty and ``resume`` is False, or if it holds something else than a run.
        DiskError: if it cannot be written to.
    """
    _refuse_strangers(folder, resume)
    require_writable(folder)


def open_run_folder(folder: Path, config: RunConfig, *, resume: bool) -> RunLock:
    """Make ``folder`` the folder of a run of ``config``, or check that it holds such a run already. Lock it.

    A resumed run may change these settings: how often it logs, validates and saves, what is measured afterwards, the
    number of processes and of passes a step, and how a step is computed, up to rounding. ``config.json`` is updated
    with them, except for a finished run.

    Returns:
        The lock, held until ``release`` (it is also a context manager) or the end of the process.

    Raises:
        FileExistsError: if the folder is not empty and ``resume`` is False.
        ValueError: if it holds a run of another configuration.
        DiskError: if it cannot be written to, or another process uses it.
    """
    check_run_folder(folder, resume=resume)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = RunLock(folder)
    except DiskError:
        raise
    except OSError as error:
        raise DiskError(error.errno, f"{folder} cannot be written to: {error.strerror}; choose another --out") from None
    try:
        _refuse_strangers(folder, resume)
        path = folder / "config.json"
        if path.exists():
            _refuse_other_run(folder, path, config)
        if not (folder / "model").is_dir():
            config.save(path)
    except FileExistsError:
        lock.release()
        raise
    except OSError as error:
        lock.release()
        raise explained(error, folder, len(json.dumps(config.to_dict())), path.name) from error
    except BaseException:
        lock.release()
        raise
    return lock


def save_model(model, tokenizer, folder: Path, config: RunConfig) -> None:
    """Write model, tokenizer and a card with ``training_facts`` to ``folder`` in Hugging Face's format, atomically.

    A damaged model there is kept as ``NAME.damaged``.

    Raises:
        DiskError: if it cannot be written. What was there before is intact, and so is the run's last checkpoint.
    """
    needed = state_bytes({"model": model})
    try:
        with replacing(folder) as partial:
            require_room(folder.parent, needed, "the model")
            partial.mkdir(exist_ok=True)
            if isinstance(model.config, DiffTransformerConfig) or hasattr(model.config, "differential"):
                write_card(model, partial, training_facts(config))
            model.save_pretrained(partial)
            tokenizer.save_pretrained(partial)
    except Exception as error:
        if not isinstance(error, DiskError):
            error = explained(error, folder.parent, needed, "the model")
        raise DiskError(
            error.errno or errno.EIO, f"{error.strerror}; the checkpoints are intact: make room, then --resume"
        ) from error


def damaged_model(folder: Path, model) -> str | None:
    """The defect of the saved ``model`` in ``folder``, or None. Names and shapes are compared, not numbers."""
    try:
        if "quantization_config" in read_settings(folder):  # the user's own
            return None
        shapes = {name: tuple(tensor.shape) for name, tensor in read_tensors(folder).items()}
    except (ValueError, OSError) as error:
        return str(error)
    weights = model.state_dict()
    there = {weights[name].data_ptr() for name in shapes if name in weights}
    lost = [
        name
        for name, weight in weights.items()  # tied weights are saved once
        if (shapes[name] != tuple(weight.shape) if name in shapes else weight.data_ptr() not in there)
    ]
    return f"{folder} lacks {listed(lost)}" if lost else None


def training_facts(config: RunConfig) -> dict[str, str]:
    """How ``config`` trains a model, for its card. Folders are named without the path to them."""
    data, settings, optim = config.data, config.train, config.optim
    corpora = data.corpora or {data.corpus: 1.0}
    tokens = settings.steps * settings.batch_size * data.length
    shares = {name: share for name, share in data.mixture.items() if share > 0}
    mixture = ", ".join(_named(name, share, len(shares)) for name, share in shares.items())
    initial = settings.initial_model
    facts = {
        "recipe": config.name,
        "steps": f"{settings.steps:,}, each of {settings.batch_size} rows of {data.length:,} tokens",
        "tokens": f"{tokens:,}",
        "corpus": ", ".join(_named(name, weight, len(corpora)) for name, weight in corpora.items()),
        "sources of rows": mixture,
        "optimizer": f"AdamW, learning rate {optim.lr:g} after {optim.warmup_steps:,} steps of warm-up, falling "
        f"linearly to {optim.lr * optim.final_lr_ratio:g}; weight decay {optim.weight_decay:g}",
        "precision": settings.precision,
        "start": "random weights" if initial is None else f"the weights of {label_of(initial)}",
        "seed of weights and rows": f"{settings.seed}",
    }
    return {name: " ".join(value.replace("|", "/").split()) for name, value in facts.items()}


def _named(name: str, weight: float, of: int) -> str:
    return Path(name).name if of == 1 else f"{Path(name).name} ({weight:g})"


def _refuse_strangers(folder: Path, resume: bool) -> None:
    if (folder / "config.json").exists():
        if not resume:
            raise UserError(f"{folder} holds a run already; resume it (--resume) or choose another folder")
    elif folder.is_dir() and any(not _is_ours(entry.name) for entry in folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no run; choose another folder")


def _is_ours(name: str) -> bool:
    return name in _OURS or name == "config.json.partial"


def _refuse_other_run(folder: Path, path: Path, config: RunConfig) -> None:
    values = read_json(path, "restore the run's configuration, or start again in another folder")
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__}, not the configuration of a run; restore it")
    try:
        there = RunConfig.from_dict(values).to_dict()
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    different = changes_results(there, config.to_dict())
    if different:
        listed = "\n  ".join(different)
        raise UserError(f"{folder} holds a run of another configuration (saved against given):\n  {listed}")
