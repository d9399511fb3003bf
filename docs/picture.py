"""Draw docs/picture.svg, the picture of README: two maps, their difference, from the formula on a toy example.

python docs/picture.py
"""

from pathlib import Path

import numpy as np

from diff_transformer.report.charts import grid
from diff_transformer.report.render import Chart, save

CELL, SIZE = 13, 14
ANSWER, LAMBDA = 4, 0.8


def toy_maps() -> tuple[np.ndarray, np.ndarray]:
    """Two causal maps that agree on the noise; only the first also sees the answer, from the last rows."""
    rng = np.random.default_rng(3)
    noise = rng.normal(0, 0.7, (SIZE, SIZE))
    first, second = noise + rng.normal(0, 0.1, noise.shape), noise + rng.normal(0, 0.1, noise.shape)
    first[-5:, ANSWER] += 2.6
    hidden = np.triu(np.full((SIZE, SIZE), -np.inf), 1)
    return tuple(np.exp(s + hidden) / np.exp(s + hidden).sum(1, keepdims=True) for s in (first, second))  # ty: ignore


def heat(title: str, values: np.ndarray) -> Chart:
    """A map; the stronger the tint, the larger the weight; a negative one has a colour of its own."""
    cells = [
        {"row": row, "column": column, "weight": min(1.0, abs(values[row, column]) * 2.2),
         "fill": f"var(--{'diff' if values[row, column] >= 0 else 'softmax'})"}
        for row in range(SIZE) for column in range(row + 1)
    ]  # fmt: skip
    scale = {"domain": list(range(SIZE)), "padding": 0.08}
    return {
        "description": title,
        "width": CELL * SIZE,
        "height": CELL * SIZE,
        "data": {"values": cells},
        "view": {"stroke": "var(--rule)"},
        "mark": {"type": "rect", "aria": False},
        "encoding": {
            "x": {"field": "column", "type": "ordinal", "axis": None, "scale": scale},
            "y": {"field": "row", "type": "ordinal", "axis": None, "scale": scale},
            "fill": {"field": "fill", "scale": None},
            "fillOpacity": {"field": "weight", "type": "quantitative", "scale": {"domain": [0, 1], "range": [0, 1]},
                            "legend": None},
        },
    }  # fmt: skip


def main() -> None:
    first, second = toy_maps()
    maps = {
        "softmax(Q1 K1ᵀ/√d)": first,
        "−  λ softmax(Q2 K2ᵀ/√d)": second,
        "=  the difference": first - LAMBDA * second,
    }
    chart = grid([(title, heat(title, values)) for title, values in maps.items()], {})
    caption = "what both maps see cancels; what only one sees, the answer, stays"
    save(
        chart | {"title": {"text": caption, "orient": "bottom", "anchor": "middle"}},
        Path(__file__).with_name("picture.svg"),
    )


if __name__ == "__main__":
    main()
