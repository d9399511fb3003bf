"""The meaning of transformers' ``attn_implementation``: one name selects differential and softmax backends.

``from_pretrained(folder, attn_implementation=NAME)`` and ``model.set_attn_implementation(NAME)`` accept the names of
``IMPLEMENTATIONS``. Without one, ``config.backend`` determines the backend of differential attention.
"""

from typing import NamedTuple

from diff_transformer.checks import did_you_mean, require_known
from diff_transformer.errors import UserError
from diff_transformer.model.heads import CORES
from diff_transformer.ops.backends import BACKENDS

DEFAULT = "diff_auto"


class Implementation(NamedTuple):
    """diff: backend of ``diff_attention``, None for ``config.backend``; softmax: one of ``softmax_attention``."""

    diff: str | None
    softmax: str


IMPLEMENTATIONS = {
    DEFAULT: Implementation(None, "sdpa"),
    "eager": Implementation("reference", "eager"),
    "sdpa": Implementation("sdpa", "sdpa"),
    **{f"diff_{name}": Implementation(name, "sdpa") for name in BACKENDS},
}
OWN_NAMES = tuple(name for name in IMPLEMENTATIONS if name.startswith("diff_"))
# transformers' continuous batching calls "eager" by another name.
_OTHER_NAMES = {None: DEFAULT, "paged|eager": "eager"}


def check_backend(name: str) -> None:
    """Raise ValueError for a backend that is neither "auto" nor in ``BACKENDS``, TypeError for a non-string."""
    if not isinstance(name, str):
        raise UserError(f"backend is {name!r}; give one name: 'auto' or one of {', '.join(BACKENDS)}")
    require_known("backend", name, ("auto", *BACKENDS))


def check_implementation(name: str | None) -> str:
    """The name that the configuration keeps; None means the default.

    Raises:
        ValueError: for a name that is not in ``IMPLEMENTATIONS``.
    """
    if not isinstance(name, str | None) or _OTHER_NAMES.get(name, name) not in IMPLEMENTATIONS:
        hint = did_you_mean(str(name), IMPLEMENTATIONS)
        if isinstance(name, str) and "/" in name:
            hint = " (a kernel from the hub, which computes softmax attention only; take 'diff_auto' instead)"
        others = ", ".join(repr(other) for other in IMPLEMENTATIONS if other != "eager")
        raise UserError(  # in transformers' words, by which programs know the error
            f'Specified `attn_implementation="{name}"` is not supported. The only possible arguments are '
            f'`attn_implementation="eager"`, {others}{hint}'
        )
    return DEFAULT if name is None else name


def implementation(name: str | None) -> Implementation:
    """The backends of a checked name."""
    return IMPLEMENTATIONS[_OTHER_NAMES.get(name, name or DEFAULT)]


def attention_backend(config) -> str:
    """The backend of a model of ``config``: of ``diff_attention``, or of ``softmax_attention``."""
    chosen = implementation(config._attn_implementation)
    if CORES[config.attention].maps == 1:
        return chosen.softmax
    return config.backend if chosen.diff is None else chosen.diff
