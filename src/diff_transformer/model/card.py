"""The model card that ``save_pretrained`` writes beside a model, so that a reader of the folder can load it."""

import re
from pathlib import Path
from typing import Any


def write_card(model: Any, folder: Path) -> None:
    """Write ``README.md`` to ``folder``; an existing one is kept.

    Args:
        model: of this package, or one that ``differentiate`` changed.
    """
    path = folder / "README.md"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(card(model), encoding="utf-8")


def card(model: Any) -> str:
    """The text of the model card: what the model is, and how to load it."""
    name, entry = type(model).__name__, getattr(model.config, "differential", None)
    needs = "It needs the package: `pip install diff-transformer`."
    if entry is None:
        source = vars(model).get("source_facts") or {}
        auto = "AutoModelForCausalLM" if name.endswith("ForCausalLM") else "AutoModel"
        title = f"{name} with attention={model.config.attention!r}"
        needs += (
            " vLLM then finds the model by itself; other programs import `diff_transformer` first, or pass "
            "`trust_remote_code=True`."
        )
    else:
        source, auto = entry.get("source") or {}, "AutoModelForCausalLM"
        paper = "2505.16333" if entry["kind"] == "dex" else "2410.05258"
        title = f"{source.get('base_model') or name} with differential attention (`{entry['kind']}`, arXiv {paper})"
    head = "".join(f"{key}: {value}\n" for key, value in {"library_name": "transformers", **source}.items())
    return (
        f"---\n{head}tags:\n- diff-transformer\n- differential-attention\n---\n\n# {title}\n\n{needs}\n\n"
        "Load it, with the path of this folder for `FOLDER`:\n\n```python\n"
        "import diff_transformer  # registers the model with transformers\n"
        f'from transformers import {auto}\n\nmodel = {auto}.from_pretrained("FOLDER")\n```\n'
    )


def source_facts(name_or_path: str) -> dict[str, str]:
    """``base_model`` and, if the card in its folder says it, the licence of a model that others are made from."""
    if not name_or_path:  # of a model that was not loaded
        return {}
    folder = Path(name_or_path)
    name = _name_on_hub(folder) or (label_of(str(folder.resolve())) if folder.is_dir() else name_or_path)
    path = folder / "README.md"
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    head = re.match(r"---\n(.*?)\n---", text, re.DOTALL)
    licence = re.findall(r"^(license(?:_name|_link)?): *(\S.*)$", head[1] if head else "", re.MULTILINE)
    return {"base_model": name, **dict(licence)}


def label_of(name_or_path: str) -> str:
    """A model's name in results: the last distinctive part of its path (``diff-seed0`` for
    ``members/diff-seed0/run/model``, ``tiny`` for a snapshot of ``acme/tiny`` in the hub's cache)."""
    path = Path(name_or_path)
    if name := _name_on_hub(path):
        return name.rpartition("/")[2]
    parts = [part for part in path.parts if part not in ("run", "model", "/", ".", "..", "~")]
    return parts[-1] if parts else path.resolve().name


def _name_on_hub(folder: Path) -> str | None:
    """``acme/tiny`` for a snapshot in the hub's cache, ``models--acme--tiny/snapshots/HASH``."""
    repository = folder.parent.parent.name
    if folder.parent.name != "snapshots" or not repository.startswith("models--"):
        return None
    return repository.removeprefix("models--").replace("--", "/")
