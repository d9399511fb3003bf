"""The attention explorer of the page: this module packs the maps, and explorer.js draws them."""

import base64

import numpy as np

from diff_transformer.lab.rows import Rows

BUDGET = 1_250_000  # characters of base64 in the page, over all examples
FIRST = 2_500_000  # as many when there is only one


def examples(rows: Rows, sides: dict[str, str]) -> tuple[list[dict], int]:
    """Example texts with each model's maps, as explorer.js takes them, and how many did not fit into the page.

    Those that most models answer come first.
    """
    texts: dict[tuple, dict] = {}
    frame = rows["explorer"]
    for side, entry in zip(frame["side"], frame["entry"], strict=True):
        tokens, title = [str(token) for token in entry["tokens"]], str(entry.get("title") or "example")
        text = texts.setdefault((title, *tokens), {"title": title, "tokens": tokens, "models": []})
        text["models"].append(_model(entry, list(sides).index(side), sides[side], len(tokens)))
    for text in texts.values():
        text["models"].sort(key=lambda model: model["side"])
    kept, used = [], 0
    for text in sorted(texts.values(), key=lambda text: -sum(map(_answers, text["models"]))):
        size = sum(len(model["first"]) + len(model.get("second", "")) for model in text["models"])
        if used + size <= (BUDGET if kept else FIRST):
            kept.append(text)
            used += size
    return kept, len(texts) - len(kept)


def _answers(model: dict) -> bool:
    answer = model["answer"].strip()
    return bool(answer) and model["generated"].strip().startswith(answer)


def _model(entry: dict, side: int, name: str, length: int) -> dict:
    """One model's maps on one text."""
    layers, heads = int(entry["layers"]), int(entry["heads"])
    packed = {
        "side": side, "name": name, "layers": layers, "heads": heads, "span": entry.get("answer_span") or [0, 0],
        "lambda": entry.get("lambda") or [0.0] * layers, "answer": str(entry.get("answer") or ""),
        "generated": str(entry.get("generated") or ""),
    }  # fmt: skip
    return packed | {part: pack(entry[part], layers, heads, length) for part in ("first", "second") if entry.get(part)}


def pack(maps: str, layers: int, heads: int, length: int) -> str:
    """Base64 of uint8 [L, H, T, T] -> base64 of its lower triangles, row by row: [L, H, T (T + 1) / 2].

    The maps are causal, so this halves the size without loss.
    """
    raw = np.frombuffer(base64.b64decode(maps, validate=True), dtype=np.uint8).reshape(layers, heads, length, length)
    rows, columns = np.tril_indices(length)
    return base64.b64encode(np.ascontiguousarray(raw[:, :, rows, columns]).tobytes()).decode("ascii")
