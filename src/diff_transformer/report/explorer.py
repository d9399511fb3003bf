"""The attention-map explorer: this module packs the maps, and explorer.js draws them."""

import base64
import binascii

import numpy as np

from diff_transformer.report.charts import NAMES
from diff_transformer.report.figure import Figure, Finding
from diff_transformer.report.load import ResultsError
from diff_transformer.report.markup import is_number, plural, script_json, tag
from diff_transformer.report.models import Results, dicts, side_of

BUDGET = 1_250_000  # characters of base64 in the page, over all examples
FIRST = 2_500_000  # as many when there is only one


def build(results: Results) -> Figure | None:
    """The explorer with as many example texts as fit the page's budget."""
    texts = packed_examples([entry for record in results.records for entry in dicts(record.rows.get("explorer"))])
    kept, left_out, used = [], 0, 0
    for example in texts:
        size = sum(len(m["first"]) + len(m.get("second", "")) for m in example["models"])
        if used + size > (BUDGET if kept else FIRST):
            left_out += 1
            continue
        used += size
        kept.append(example)
    if not texts:
        return None
    findings = []
    if left_out:
        said = f"{plural(left_out, 'example')} of {len(texts)} left out: the maps would make this page too large."
        findings.append(Finding("note", said))
    body = tag("p", "The maps of the examples given are too large for one page; give shorter texts.", class_="read")
    if kept:
        words = tag("p", "The explorer needs JavaScript; the rest of the page does not.")
        data = tag("script", script_json({"examples": kept}), type="application/json", id="explorer-data")
        body = tag("div", words, id="explorer-view") + data
    return Figure(
        id="explorer",
        title="Attention maps, token by token",
        source=("Fig. 1",),
        read="Choose a layer and a head, then a token. The tint shows how much that token attends to each earlier "
        "token. DIFF subtracts λ A₂ from A₁, so weights can be negative; these have a colour of their own. The answer "
        "is outlined.",
        body=body,
        findings=findings,
    )


def packed_examples(entries: list[dict]) -> list[dict]:
    """The texts of explorer entries in the format of explorer.js: title, tokens, and each model's packed maps.

    Those that most models answer come first.

    Raises:
        ResultsError: for an entry whose maps or lambdas do not match its layers, heads and tokens.
    """
    texts: dict[tuple, dict] = {}
    for entry in entries:
        tokens = [str(t) for t in entry.get("tokens") or []]
        title = str(entry.get("title") or "example")
        if tokens:
            example = texts.setdefault((title, *tokens), {"title": title, "tokens": tokens, "models": []})
            example["models"].append(_model(entry, len(tokens)))
    for example in texts.values():
        example["models"].sort(key=lambda m: m["side"])
    return sorted(texts.values(), key=lambda example: -sum(map(_answers, example["models"])))


def _answers(model: dict) -> bool:
    answer = model["answer"].strip()
    return bool(answer) and model["generated"].strip().startswith(answer)


def _model(entry: dict, length: int) -> dict:
    """One model's maps on one text, in the format of explorer.js."""
    layers, heads = int(entry.get("layers") or 0), int(entry.get("heads") or 0)
    side = side_of(entry.get("attention"))
    name = str(entry.get("model") or NAMES[side])
    span = entry.get("answer_span") or [0, 0]
    packed = {
        "side": side,
        "name": NAMES[side],
        "model": name,
        "layers": layers,
        "heads": heads,
        "lambda": _lambdas(entry, layers, name),
        "span": [min(max(int(i), 0), length) for i in span],
        "answer": str(entry.get("answer") or ""),
        "generated": str(entry.get("generated") or ""),
    }
    for part in ("first", "second"):
        if entry.get(part):
            packed[part] = pack(entry[part], layers, heads, length, f"{part} map of {name}")
    if "first" not in packed:
        raise ResultsError(f'explorer entry of {name} has no "first" map; give base64 bytes of [layers, heads, T, T]')
    return packed


def _lambdas(entry: dict, layers: int, name: str) -> list[float]:
    values = entry.get("lambda") if entry.get("second") else [0.0] * layers
    if not isinstance(values, list) or len(values) != layers or not all(is_number(v) for v in values):
        raise ResultsError(
            f'explorer entry of {name} has "lambda" {values!r}; give one number for each of {layers} layers'
        )
    return [float(v) for v in values]


def pack(maps: str, layers: int, heads: int, length: int, where: str) -> str:
    """Base64 of uint8 [L, H, T, T] -> base64 of its lower triangles, row by row: [L, H, T (T + 1) / 2].

    The maps are causal, so this halves the size without loss. Raises ResultsError if the number of bytes is wrong.
    """
    try:
        raw = np.frombuffer(base64.b64decode(maps, validate=True), dtype=np.uint8)
    except (binascii.Error, TypeError, ValueError) as error:
        raise ResultsError(f"the {where} is not base64: {error}") from None
    wanted = layers * heads * length * length
    if raw.size != wanted or not wanted:
        raise ResultsError(
            f"the {where} has {raw.size} bytes, but "
            f"{layers} layers x {heads} heads x {length} x {length} tokens are {wanted}"
        )
    rows, columns = np.tril_indices(length)
    triangles = raw.reshape(layers, heads, length, length)[:, :, rows, columns]  # [L, H, T (T + 1) / 2]
    return base64.b64encode(np.ascontiguousarray(triangles).tobytes()).decode("ascii")
