"""The texts of the page's attention explorer; explorer.js draws the maps that ``evals/explorer.py`` packed."""

from diff_transformer.lab.rows import Rows

BUDGET = 1_250_000  # characters of base64 in the page, over all examples
FIRST = 2_500_000  # as many when there is only one


def examples(rows: Rows, sides: dict[str, str]) -> tuple[list[dict], int]:
    """Example texts with each model's maps, and how many did not fit into the page.

    Those that most models answer come first.
    """
    texts: dict[tuple, dict] = {}
    frame = rows["explorer"]
    several = frame["setting"].nunique() > 1
    for setting, side, entry in zip(frame["setting"], frame["side"], frame["entry"], strict=True):
        title, tokens = entry["title"], entry["tokens"]
        text = texts.setdefault((title, *tokens), {"title": title, "tokens": tokens, "models": []})
        name = f"{sides[side]}, {setting}" if several else sides[side]
        text["models"].append({**entry, "side": list(sides).index(side), "name": name})
    for text in texts.values():
        text["models"].sort(key=lambda model: model["side"])
    shown, used = [], 0
    for text in sorted(texts.values(), key=lambda text: -sum(map(_answers, text["models"]))):
        size = sum(len(model["first"]) + len(model.get("second", "")) for model in text["models"])
        if used + size <= (BUDGET if shown else FIRST):
            shown.append(text)
            used += size
    return shown, len(texts) - len(shown)


def _answers(model: dict) -> bool:
    answer = model["answer"].strip()
    return bool(answer) and model["generated"].strip().startswith(answer)
