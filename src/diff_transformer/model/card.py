"""The model card that ``save_pretrained`` writes beside a model, so that a reader of the folder can load it."""

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from diff_transformer.model.cost import count_parameters

_KINDS = {
    "diff": "DIFF Transformer (differential attention, arXiv 2410.05258)",
    "diff_v2": "DIFF Transformer V2 (differential attention with a lambda for each token and head)",
    "diff_v3": "DIFF Transformer V3 (differential attention with a gate on each map, for each token and head)",
    "gated": "Transformer with gated softmax attention",
    "grouped_diff": "DIFF Transformer with grouped differential attention (arXiv 2510.06949)",
    "dint": "DINT Transformer (differential attention plus its mean, arXiv 2501.17486)",
    "softmax": "Transformer with softmax attention, the baseline of a DIFF Transformer",
}
_TRAINING = "\n## How it was trained\n\n| setting | |\n|---|---|\n"


def write_card(
    config,
    folder: Path,
    model_class: str,
    *,
    training: Mapping[str, str] | None = None,
    source: Mapping[str, str] | None = None,
) -> None:
    """Write ``README.md`` to ``folder``; an existing one is kept.

    Args:
        training: how the model was trained, by name; None if it is not known.
        source: ``source_facts`` of the model that this one was converted from.
    """
    path = folder / "README.md"
    if not path.exists():
        path.write_text(card(config, model_class, training=training, source=source), encoding="utf-8")


def source_facts(name_or_path: str) -> dict[str, str]:
    """``base_model`` and, if the card in its folder says it, the licence of a model that others are made from."""
    if not name_or_path:  # of a model that was not loaded
        return {}
    folder = Path(name_or_path)
    if folder.parent.name == "snapshots" and folder.parent.parent.name.startswith("models--"):  # the hub's cache
        name = folder.parent.parent.name.removeprefix("models--").replace("--", "/")
    else:
        name = folder.resolve().name if folder.is_dir() else name_or_path
    card = folder / "README.md"
    text = card.read_text(encoding="utf-8") if card.is_file() else ""
    head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    licence = re.findall(r"^(license(?:_name|_link)?): *(\S.*)$", head[1] if head else "", re.MULTILINE)
    return {"base_model": name, **dict(licence)}


def read_training(folder: Path) -> dict[str, str] | None:
    """The training of the model in ``folder``, as its card says; None without such a table."""
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    _, found, rest = text.partition(_TRAINING)
    lines = itertools.takewhile(lambda line: line.startswith("| "), rest.splitlines())
    return dict(line[2:-2].split(" | ", 1) for line in lines) if found else None


def card(
    config, model_class: str, *, training: Mapping[str, str] | None = None, source: Mapping[str, str] | None = None
) -> str:
    """The text of the model card: what the model is, how to load it, its sizes, how it was trained if that is known."""
    auto = f"AutoModel{model_class.partition('For')[1]}{model_class.partition('For')[2]}"
    load = (
        "import diff_transformer  # registers the model with transformers\n"
        f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("FOLDER")'
    )
    needs = (
        "It needs the package (`pip install diff-transformer`). vLLM then finds the model by itself; other programs "
        "import `diff_transformer` first, or pass `trust_remote_code=True`."
    )
    rows = {
        "parameters": f"{sum(count_parameters(config).values()):,}",
        "layers": config.num_hidden_layers,
        "hidden size": config.hidden_size,
        "attention heads": f"{config.heads.outputs} (values of width {config.heads.value_dim})",
        "head width": config.head_dim,
        "vocabulary": f"{config.vocab_size:,}",
        "longest sequence": f"{config.max_position_embeddings:,} tokens",
    }
    return (
        f"{_head(source, 'diff-transformer')}# {_KINDS[config.attention]}\n\n{needs}\n\n"
        "Load it, with the path of this folder for `FOLDER`:\n\n"
        f"```python\n{load}\n```\n\n| size | |\n|---|---|\n{_table(rows)}"
        + (f"{_TRAINING}{_table(training)}" if training else "")
    )


def differential_card(model, *, training: Mapping[str, str] | None = None) -> str:
    """The text of the card of a model that ``differentiate`` changed.

    Args:
        training: how it was trained since, by name.
    """
    entry, name = model.config.differential, type(model).__name__
    facts = entry.get("source") or {}
    source = facts.get("base_model", "")
    maps = {
        "diff_v2": "twice the query heads over the same keys; lambda is a sigmoid for each token and head",
        "diff": "twice the query and key heads; lambda is learned in each layer",
    }[entry["kind"]]
    rows = {
        **({"made of": source} if source else {}),
        "class": f"{name}, whose code is unchanged",
        "attention": f"`{entry['kind']}`: {maps}",
        "lambda at the start": f"{entry['lambda_init']:g}",
        "parameters": f"{model.num_parameters():,}",
    }
    start = "" if training else " Until further training, the logits are those of the model before, up to rounding."
    return (
        f"{_head(facts, 'diff-transformer', 'differential-attention')}"
        f"# {source or name} with differential attention{', trained' if training else ''}\n\n"
        f"Each attention head became two, whose maps are subtracted (arXiv 2410.05258).{start} It needs the package "
        "(`pip install diff-transformer`):\n\n```python\nimport diff_transformer  # tells transformers\n"
        "from transformers import AutoModelForCausalLM\n\n"
        f'model = AutoModelForCausalLM.from_pretrained("FOLDER")\n```\n\n| | |\n|---|---|\n{_table(rows)}'
        + (f"{_TRAINING}{_table(training)}" if training else "")
    )


def _head(source: Mapping[str, str] | None, *tags: str) -> str:
    """The card's metadata, as the hub reads it."""
    facts = "".join(f"{name}: {value}\n" for name, value in (source or {}).items())
    return f"---\nlibrary_name: transformers\n{facts}tags:\n" + "".join(f"- {tag}\n" for tag in tags) + "---\n\n"


def _table(rows: Mapping[str, object]) -> str:
    return "".join(f"| {name} | {value} |\n" for name, value in rows.items())
