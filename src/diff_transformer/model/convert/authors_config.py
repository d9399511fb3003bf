"""Sizes and tensor names of a model in the authors' layout (microsoft/unilm, folder Diff-Transformer), both versions.

The authors published only the attention. The other tensors have the names of the same repository's decoder (folder
YOCO) or of Hugging Face models; the attention is called ``attention`` or ``self_attn``.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from diff_transformer.model.convert.checkpoint import Checkpoint
from diff_transformer.model.convert.plan import HUGGING_FACE, LAMBDAS, Names, Shapes, shapes_by_role, without
from diff_transformer.model.saved import read_settings

_PROJECTIONS: Names = {"q": "q_proj.weight", "k": "k_proj.weight", "v": "v_proj.weight"}
LAYER: dict[int, Names] = {
    1: {
        **_PROJECTIONS,
        "o": "out_proj.weight",
        **{name: name for name in LAMBDAS},
        "head_norm": "subln.weight",
    },
    2: {**_PROJECTIONS, "o": "o_proj.weight", "lambda_proj": "lambda_proj.weight"},
}
_UNILM: Names = {
    "embedding": "tok_embeddings.weight",
    "attention_norm": "layers.{i}.attention_norm.weight",
    "mlp_norm": "layers.{i}.ffn_norm.weight",
    "gate": "layers.{i}.feed_forward.w1.weight",
    "up": "layers.{i}.feed_forward.w3.weight",
    "down": "layers.{i}.feed_forward.w2.weight",
    "norm": "norm.weight",
    "head": "output.weight",
}
_DIALECTS = (
    (_UNILM, "layers.{i}.attention."),
    (_UNILM, "layers.{i}.self_attn."),
    (without(HUGGING_FACE, *"qkvo"), "model.layers.{i}.self_attn."),
)


@dataclass
class AuthorsConfig:
    """Sizes under the names of that repository's ``ModelArgs``.

    ``n_heads`` counts the heads that reach W_O: differential heads, in version 1 half of the matched Transformer's.
    ``n_kv_heads`` counts pairs of keys in version 1 and keys in version 2. The fields from ``version`` on follow from
    the tensors' names and the file that the model was trained with. ``assumed`` lists settings that no file states.
    """

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_seq_len: int = 4096
    version: int = 1
    dialect: int = 0
    tied: bool = False
    has_head_norm_weight: bool = True
    naive: bool = False
    assumed: tuple[str, ...] = ()

    def names(self) -> Names:
        absent = ["head"] if self.tied else []
        if not self.has_head_norm_weight:
            absent.append("head_norm")
        return without(_names(self.dialect, self.version), *absent)

    def notes(self) -> list[str]:
        """One note if a setting was assumed."""
        told = ", ".join(f"{name} {getattr(self, name):g}" for name in self.assumed)
        return [f"neither params.json nor config.json says otherwise, so {told}"] if told else []


_NOT_IN_PARAMS = ("version", "dialect", "tied", "has_head_norm_weight", "naive", "assumed")
_SETTINGS = ("norm_eps", "rope_theta", "max_seq_len")  # no tensor shape determines these
_HUGGING_FACE_SETTINGS = {
    "rms_norm_eps": "norm_eps", "max_position_embeddings": "max_seq_len", "hidden_size": "dim",
    "num_hidden_layers": "n_layers", "intermediate_size": "hidden_dim",
}  # fmt: skip


def read_params(checkpoint: Checkpoint, version: int, naive: bool = False) -> AuthorsConfig:
    """Read sizes from the shapes of the tensors, and the rest from ``params.json`` or ``config.json``.

    These files may use the names of ``AuthorsConfig`` or Hugging Face's.

    Raises:
        ValueError: if a required tensor is missing, the file contradicts the tensors, or it asks for something that
            this layout does not have.
    """
    shapes = checkpoint.shapes()
    dialect = next((i for i in range(len(_DIALECTS)) if _is_dialect(shapes, _names(i, version))), 0)
    names = _names(dialect, version)

    def shape(role: str) -> tuple[int, ...]:
        name = names[role].format(i=0)
        if name not in shapes:
            raise ValueError(f"{checkpoint.folder} has no tensor {name}, which the authors' layout has")
        return shapes[name]

    if version == 1:
        d = shape("lambda_q1")[0]
        heads, keys = shape("q")[0] // (2 * d), shape("k")[0] // (2 * d)
    else:
        heads = shape("lambda_proj")[0]
        d = shape("o")[1] // heads
        keys = shape("k")[0] // d
    layer = re.compile(re.escape(names["q"]).replace(r"\{i\}", r"(\d+)"))
    found = [int(match[1]) for name in shapes if (match := layer.fullmatch(name))]
    told = _told(checkpoint.folder)
    config = AuthorsConfig(
        dim=shape("embedding")[1],
        n_layers=max(found) + 1,
        n_heads=heads,
        n_kv_heads=keys,
        head_dim=d,
        hidden_dim=shape("gate")[0],
        vocab_size=shape("embedding")[0],
        **{name: told[name] for name in _SETTINGS if told.get(name)},
        version=version,
        dialect=dialect,
        tied=names["head"] not in shapes,
        has_head_norm_weight=any(name.endswith("subln.weight") for name in shapes),
        naive=naive,
        assumed=tuple(name for name in _SETTINGS if not told.get(name)),
    )
    _check_told(checkpoint.folder, told, asdict(config))
    return config


def write_params(config: AuthorsConfig, folder: Path) -> None:
    params = {name: value for name, value in asdict(config).items() if name not in _NOT_IN_PARAMS}
    (folder / "params.json").write_text(json.dumps(params, indent=2) + "\n")


def shapes_of_params(config: AuthorsConfig) -> Shapes:
    d, dim = config.head_dim, config.dim
    queries = 2 * config.n_heads * d
    keys, outputs = (
        (2 * config.n_kv_heads * d, queries) if config.version == 1 else (config.n_kv_heads * d, queries // 2)
    )
    by_role = {
        **dict.fromkeys(("embedding", "head"), (config.vocab_size, dim)),
        **dict.fromkeys(("norm", "attention_norm", "mlp_norm"), (dim,)),
        **dict.fromkeys(("gate", "up"), (config.hidden_dim, dim)),
        "down": (dim, config.hidden_dim),
        "q": (queries, dim),
        **dict.fromkeys(("k", "v"), (keys, dim)),
        "o": (dim, outputs),
        "lambda_proj": (config.n_heads, dim),
        "head_norm": (2 * d,),
        **dict.fromkeys(LAMBDAS, (d,)),
    }
    return shapes_by_role(config.names(), by_role, config.n_layers)


def _names(dialect: int, version: int) -> Names:
    names, prefix = _DIALECTS[dialect]
    return {**names, **{role: prefix + name for role, name in LAYER[version].items()}}


def _is_dialect(shapes: Shapes, names: Names) -> bool:
    return all(names[role].format(i=0) in shapes for role in ("embedding", "q", "o"))


def _told(folder: Path) -> dict:
    """The settings in ``folder`` under the names of ``AuthorsConfig``; unknown settings are kept."""
    told = dict(read_settings(folder, "params.json") or read_settings(folder) or {})
    rope: dict = {}
    for name in ("rope_parameters", "rope_scaling"):
        given = told.get(name) or {}
        rope |= given if isinstance(given, dict) else {"type": given}
    theta = rope.pop("rope_theta", None)
    kind = rope.pop("rope_type", None) or rope.pop("type", None) or ("scaled" if rope.get("factor") else "default")
    wrong = {
        "rotary embedding": kind if kind != "default" or rope.get("partial_rotary_factor", 1) != 1 else None,
        "hidden_act": told.get("hidden_act") if told.get("hidden_act") not in ("silu", "swish") else None,
        "sliding_window": told.get("sliding_window") if told.get("use_sliding_window", True) else None,
    }
    for name, value in wrong.items():
        if value is not None:
            shown = f"{value} ({rope})" if name == "rotary embedding" else repr(value)
            raise ValueError(
                f"{folder}: {name} is {shown}; the authors' layout has plain rotary embeddings over the whole head, "
                "silu and no window"
            )
    synonyms = [(name, _HUGGING_FACE_SETTINGS[name], told[name]) for name in _HUGGING_FACE_SETTINGS if name in told]
    for name, own, value in [*synonyms, ("rope_parameters' rope_theta", "rope_theta", theta)]:
        if value is not None and told.setdefault(own, value) != value:
            raise ValueError(
                f"{folder}: {name} is {value}, but {own} is {told[own]}; they mean the same, leave one out"
            )
    return told


def _check_told(folder: Path, told: dict, sizes: dict):
    different = [
        f"{name} is {told[name]}, the tensors have {value}"
        for name, value in sizes.items()
        if name in told and told[name] != value
    ]
    if different:
        raise ValueError(
            f"{folder}: {'; '.join(different)}; n_heads and n_kv_heads count differential heads, half of the matched "
            "Transformer's"
        )
