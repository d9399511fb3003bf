"""The folder of a run: never overwritten, used by one process (or one group of ranks) at a time.

It holds ``config.json``, ``metrics.jsonl``, ``checkpoints/`` and, at the end, ``model/`` in Hugging Face's format.
"""

import re
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from diff_transformer.checks import differences
from diff_transformer.durable import PARTIAL, remove, replacing, require_writable
from diff_transformer.errors import UserError
from diff_transformer.model.card import label_of, write_card
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.train.config import RunConfig

LOCK = "run.lock"
# Settings that a resumed run may change: they affect results by rounding at most. evaluation.seed draws held-out rows.
_FREE = re.compile(
    r"evaluation\.(?!seed:)|train\.(checkpoint_\w+|parallel\.\w+|prefetch|peak_flops|accumulate|micro_batch_size|loss_chunk"
    r"|activation_checkpointing|compile|threads|log_every|validate_every|wandb):"
)


def changes_results(there: dict, here: dict) -> list[str]:
    """The settings in which two configurations differ that change results by more than rounding, a line each."""
    return [line for line in differences(there, here) if not _FREE.match(line)]


@contextmanager
def locked(folder: Path) -> Generator[None]:
    """Context in which no other process works in ``folder``; the system releases the lock if this process is killed.

    Raises:
        UserError: if another process does.
    """
    try:
        with FileLock(folder / LOCK, timeout=0, thread_local=False):
            yield
    except Timeout:
        raise UserError(f"another process works in {folder}; wait for it, stop it, or choose another --out") from None


def check_run_folder(folder: Path, *, resume: bool) -> None:
    """Check that ``folder`` can be the folder of a run. Writes nothing.

    Raises:
        UserError: if the folder is not empty and ``resume`` is False, holds something else than a run, or cannot be
            written to.
    """
    require_writable(folder)
    if (folder / "config.json").exists():
        if not resume:
            raise UserError(f"{folder} holds a run already; resume it (--resume) or choose another folder")
    elif folder.is_dir() and any(not _is_ours(entry.name) for entry in folder.iterdir()):
        raise UserError(f"{folder} is not empty and holds no run; choose another folder")


def _is_ours(name: str) -> bool:
    return name in (LOCK, "train.log") or name.endswith(PARTIAL)


@contextmanager
def run_folder(folder: Path, config: RunConfig, *, resume: bool) -> Generator[None]:
    """Context in which ``folder`` is that of a run of ``config`` and no other process works in it.

    A resumed run may change these settings: how often it logs, validates and saves, what is measured afterwards, the
    number of processes and of passes a step, and how a step is computed, up to rounding. ``config.json`` is updated
    with them, except for a finished run.

    Raises:
        UserError: as ``check_run_folder``, if another process works in it, or it holds a run of another configuration.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        check_run_folder(folder, resume=resume)
        path = folder / "config.json"
        if path.exists():
            different = changes_results(RunConfig.load(path).to_dict(), config.to_dict())
            if different:
                lines = "\n  ".join(different)
                raise UserError(f"{folder} holds a run of another configuration (saved against given):\n  {lines}")
        if not (folder / "model").is_dir():
            config.save(path)
        yield


def save_model(model, tokenizer, folder: Path, config: RunConfig) -> None:
    """Write model, tokenizer and a card with ``training_facts`` to ``folder`` in Hugging Face's format, atomically."""
    for unfinished in folder.parent.glob(f"{folder.name}.*{PARTIAL}"):
        remove(unfinished)
    with replacing(folder) as partial:
        partial.mkdir()
        if isinstance(model.config, DiffTransformerConfig) or hasattr(model.config, "differential"):
            write_card(model, partial, training_facts(config))
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        remove(folder)  # of a run that was finished and went back; its checkpoint is newer


def training_facts(config: RunConfig) -> dict[str, str]:
    """How ``config`` trains a model, for its card. Folders are named without the path to them."""
    data, settings, optim = config.data, config.train, config.optim
    corpora = data.corpora or {data.corpus: 1.0}
    tokens = settings.steps * settings.batch_size * data.length
    initial = settings.initial_model
    facts = {
        "recipe": config.name,
        "steps": f"{settings.steps:,}, each of {settings.batch_size} rows of {data.length:,} tokens",
        "tokens": f"{tokens:,}",
        "corpus": ", ".join(_named(name, weight, len(corpora)) for name, weight in corpora.items()),
        "sources of rows": ", ".join(_named(name, share, len(data.shares)) for name, share in data.shares.items()),
        "optimizer": f"AdamW, learning rate {optim.lr:g} after {optim.warmup_steps:,} steps of warm-up, falling "
        f"linearly to {optim.lr * optim.final_lr_ratio:g}; weight decay {optim.weight_decay:g}",
        "precision": settings.precision,
        "start": "random weights" if initial is None else f"the weights of {label_of(initial)}",
        "seed of weights and rows": f"{settings.seed}",
    }
    return {name: " ".join(value.replace("|", "/").split()) for name, value in facts.items()}


def _named(name: str, weight: float, of: int) -> str:
    return Path(name).name if of == 1 else f"{Path(name).name} ({weight:g})"
