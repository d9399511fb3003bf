"""Sizes and names of a model in the authors' layout (microsoft/unilm, folder Diff-Transformer), of either version.

Public is the attention. The names around it are those of the same repository's decoder (folder YOCO) or of Hugging
Face, with the attention as ``attention`` or ``self_attn``.
"""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

from diff_transformer.model.convert.checkpoint import Checkpoint, read_settings
from diff_transformer.model.convert.names import HUGGING_FACE, LAMBDAS, Names, without
from diff_transformer.model.convert.plan import Shapes

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
    """Sizes, under the names of that repository's ``ModelArgs``; the last five follow from the tensors' names and from
    the file that the model was trained with.

    ``n_heads`` counts the heads that reach W_O: differential heads, in version 1 half of the matched Transformer's.
    ``n_kv_heads`` counts pairs of keys in version 1, and keys in version 2.
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

    def names(self) -> Names:
        absent = ["head"] if self.tied else []
        if not self.has_head_norm_weight:
            absent.append("head_norm")
        return without(_names(self.dialect, self.version), *absent)


_NOT_IN_PARAMS = ("version", "dialect", "tied", "has_head_norm_weight", "naive")


def read_params(checkpoint: Checkpoint, version: int, naive: bool = False) -> AuthorsConfig:
    """Sizes from the shapes of the tensors; ``params.json`` (or ``config.json``) gives what shapes cannot.

    Raises:
        ValueError: if a tensor that tells a size is missing, or ``params.json`` says otherwise than the tensors.
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
    told = read_settings(checkpoint.folder, "params.json") or read_settings(checkpoint.folder) or {}
    config = AuthorsConfig(
        dim=shape("embedding")[1],
        n_layers=max(found) + 1,
        n_heads=heads,
        n_kv_heads=keys,
        head_dim=d,
        hidden_dim=shape("gate")[0],
        vocab_size=shape("embedding")[0],
        **{name: told[name] for name in ("norm_eps", "rope_theta", "max_seq_len") if told.get(name)},
        version=version,
        dialect=dialect,
        tied=names["head"] not in shapes,
        has_head_norm_weight=any(name.endswith("subln.weight") for name in shapes),
        naive=naive,
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


def shapes_by_role(names: Names, by_role: dict[str, tuple[int, ...]], layers: int) -> Shapes:
    """Shapes of every tensor of a model, from one shape a role."""
    return {
        template.format(i=i): by_role[role]
        for role, template in names.items()
        for i in (range(layers) if "{i}" in template else (0,))
    }


def _names(dialect: int, version: int) -> Names:
    names, prefix = _DIALECTS[dialect]
    return {**names, **{role: prefix + name for role, name in LAYER[version].items()}}


def _is_dialect(shapes: Shapes, names: Names) -> bool:
    return all(names[role].format(i=0) in shapes for role in ("embedding", "q", "o"))


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
