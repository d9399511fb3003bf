"""Attention maps of a typed text by the models of a finished comparison."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diff_transformer.checks import read_json

TOKENS = 256  # most tokens of a typed text; the maps grow with the square
BYTES = 8192  # most bytes of a typed text in UTF-8
_TWO_MAPS = ("diff", "softmax", "softmax_norm", "diff_v2", "grouped_diff", "fixed_lambda")


class PromptError(ValueError):
    """The models cannot read a typed text; the message says what they accept."""


class UnknownModel(PromptError):
    """The comparison has no model of this name."""


@dataclass(frozen=True)
class Member:
    """A trained model of the comparison: ``folder`` was written by ``save_pretrained``."""

    name: str
    attention: str
    seed: int
    folder: Path


class TypedPrompts:
    """Attention maps of typed texts. A model is loaded on first use and kept.

    Args:
        folder: a folder of ``compare``, with models in ``members/NAME/run/model``. DINT models are left out: they add a
            third map, and the explorer draws two.

    Raises:
        FileNotFoundError: if there are no models.
    """

    def __init__(self, folder: Path | str):
        self.members = {member.name: member for member in _members(Path(folder))}
        if not self.members:
            raise FileNotFoundError(
                f"{folder} has no models in members/*/run/model, which typed texts need; give the folder that "
                "`diff-transformer compare --out` wrote"
            )
        self._read: dict[str, Any] = {}

    def entry(self, model: str, text: str) -> dict:
        """The explorer entry of ``text``, as from ``attention_entry``, with ``attention`` and ``seed``.

        Raises:
            UnknownModel: if the comparison has no such model.
            PromptError: if the text is empty, too long, or cannot be written as UTF-8.
        """
        from diff_transformer.data.tokenizer import encode
        from diff_transformer.evals.explorer import attention_entry

        if model not in self.members:
            raise UnknownModel(f"there is no model {model[:80]!r}; there are {', '.join(self.members)}")
        check_text(text)
        lm = self._lm(model)
        ids, most = encode(lm.tokenizer, text), min(TOKENS, lm.positions or TOKENS)
        if not 0 < len(ids) <= most:
            raise PromptError(f"the text has {len(ids)} tokens; {model} takes 1 to {most} here")
        member = self.members[model]
        entry = attention_entry(lm, ids, title=title_of(text))
        return entry | {"attention": member.attention, "seed": member.seed}

    def _lm(self, name: str):
        if name not in self._read:
            from diff_transformer.evals.lm import CausalLM
            from diff_transformer.model.loading import load_model

            self._read[name] = CausalLM(*load_model(str(self.members[name].folder)), name)
        return self._read[name]


def check_text(text: str) -> None:
    """Raise PromptError for a text that no model accepts."""
    try:
        size = len(text.encode("utf-8"))
    except UnicodeEncodeError:
        raise PromptError("the text holds half of a character (a lone surrogate); give whole characters") from None
    if not text.strip():
        raise PromptError("the text is empty; type some words")
    if size > BYTES:
        raise PromptError(f"the text has {size:,} bytes; {BYTES:,} are taken")


def title_of(text: str) -> str:
    """The beginning of a text on one line, as a name for it."""
    words = " ".join(text.split())
    return f"Typed: {words if len(words) <= 40 else words[:39] + '…'}"


def _members(folder: Path) -> list[Member]:
    home = folder.resolve() / "members"
    runs = [(side, seed) for seed in range(len([*home.glob("*")])) for side in _TWO_MAPS]
    members = [
        Member(f"{side}-seed{seed}", side, seed, home / f"{side}-seed{seed}" / "run/model") for side, seed in runs
    ]
    return [member for member in members if _is_saved(member.folder)]


def _is_saved(path: Path) -> bool:
    try:
        return isinstance(read_json(path / "config.json"), dict)
    except (OSError, ValueError):
        return False
