"""The meaning of transformers' ``attn_implementation``: one name selects differential and softmax backends.

``from_pretrained(folder, attn_implementation=NAME)`` and ``model.set_attn_implementation(NAME)`` accept the names of
``IMPLEMENTATIONS``. Without one, ``config.backend`` determines the backend of differential attention.
"""

from typing import NamedTuple

from diff_transformer.checks import did_you_mean, require_known
from diff_transformer.model.heads import CORES
from diff_transformer.ops import softmax_calls
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
    "flex_attention": Implementation("flex", "flex"),
    "flash_attention_2": Implementation("flash", "flash"),
    "flash_attention_3": Implementation("flash", "flash"),
    "flash_attention_4": Implementation("flash", "flash"),
    **{f"diff_{name}": Implementation(name, "sdpa") for name in BACKENDS},
}
OWN_NAMES = tuple(name for name in IMPLEMENTATIONS if name.startswith("diff_"))
# transformers' continuous batching calls "eager" by another name.
_OTHER_NAMES = {None: DEFAULT, "paged|eager": "eager"}


def check_backend(name: str) -> None:
    """Raise ValueError for a backend that is neither "auto" nor in ``BACKENDS``, TypeError for a non-string."""
    if not isinstance(name, str):
        raise TypeError(f"backend is {name!r}; give one name: 'auto' or one of {', '.join(BACKENDS)}")
    require_known("backend", name, ("auto", *BACKENDS))


def check_implementation(name: str | None) -> str:
    """The name that the configuration keeps; None means the default.

    Raises:
        ValueError: for a name that is not in ``IMPLEMENTATIONS``. RuntimeError: if flash-attn is not installed.
    """
    if not isinstance(name, str | None) or _OTHER_NAMES.get(name, name) not in IMPLEMENTATIONS:
        hint = did_you_mean(str(name), IMPLEMENTATIONS)
        if isinstance(name, str) and "/" in name:
            hint = " (a kernel from the hub, which computes softmax attention only; take 'diff_auto' instead)"
        others = ", ".join(repr(other) for other in IMPLEMENTATIONS if other != "eager")
        raise ValueError(  # in transformers' words, by which programs know the error
            f'Specified `attn_implementation="{name}"` is not supported. The only possible arguments are '
            f'`attn_implementation="eager"`, {others}{hint}'
        )
    name = DEFAULT if name is None else name
    if implementation(name).softmax == "flash" and softmax_calls.flash_package() is None:
        raise RuntimeError(
            f"attn_implementation={name!r} needs the flash-attn package, which is not installed; install it, or take "
            "'sdpa', or 'diff_triton' for kernels that come with this package"
        )
    return name


def implementation(name: str | None) -> Implementation:
    """The backends of a checked name."""
    return IMPLEMENTATIONS[_OTHER_NAMES.get(name, name or DEFAULT)]


def attention_backend(config) -> str:
    """The backend of a model of ``config``: of ``diff_attention``, or of ``softmax_attention``."""
    chosen = implementation(config._attn_implementation)
    if CORES[config.attention].maps == 1:
        return chosen.softmax
    return config.backend if chosen.diff is None else chosen.diff
