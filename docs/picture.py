"""Draw docs/picture.svg, the picture of README: two maps, their difference, from the formula on a toy example.

python docs/picture.py
"""

from pathlib import Path

import numpy as np

CELL, SIZE, GAP = 11, 14, 46
ANSWER, LAMBDA = 4, 0.8


def toy_maps() -> tuple[np.ndarray, np.ndarray]:
    """Two causal maps that agree on the noise; only the first also sees the answer, from the last rows."""
    rng = np.random.default_rng(3)
    noise = rng.normal(0, 0.7, (SIZE, SIZE))
    first, second = noise + rng.normal(0, 0.1, noise.shape), noise + rng.normal(0, 0.1, noise.shape)
    first[-5:, ANSWER] += 2.6
    hidden = np.triu(np.full((SIZE, SIZE), -np.inf), 1)
    return tuple(np.exp(s + hidden) / np.exp(s + hidden).sum(1, keepdims=True) for s in (first, second))  # ty: ignore


def grid(values: np.ndarray, x: float, label: str) -> str:
    cells = []
    for row in range(SIZE):
        for column in range(row + 1):
            value = values[row, column]
            color = "#0072b2" if value >= 0 else "#d55e00"
            place = f'x="{x + column * CELL}" y="{34 + row * CELL}" width="{CELL - 1}" height="{CELL - 1}"'
            cells.append(f'<rect {place} fill="{color}" fill-opacity="{min(1, abs(value) * 2.2):.3f}"/>')
    middle = x + SIZE * CELL / 2
    frame = f'<rect x="{x}" y="34" width="{SIZE * CELL}" height="{SIZE * CELL}" fill="none" stroke="#8888" />'
    return "".join(cells) + frame + f'<text x="{middle}" y="24" text-anchor="middle">{label}</text>'


def sign(text: str, x: float) -> str:
    return f'<text x="{x}" y="{34 + SIZE * CELL / 2 + 5}" text-anchor="middle" font-size="20">{text}</text>'


def main() -> None:
    first, second = toy_maps()
    step = SIZE * CELL + GAP
    width, height = 3 * SIZE * CELL + 2 * GAP + 20, SIZE * CELL + 66
    body = grid(first, 10, "softmax(Q1 K1ᵀ/√d)") + grid(second, 10 + step, "softmax(Q2 K2ᵀ/√d)")
    body += grid(first - LAMBDA * second, 10 + 2 * step, "the difference")
    body += sign("− λ", 10 + SIZE * CELL + GAP / 2) + sign("=", 10 + step + SIZE * CELL + GAP / 2)
    caption = "what both maps see cancels; what only one sees, the answer, stays"
    body += f'<text x="{width / 2}" y="{height - 12}" text-anchor="middle" font-size="12">{caption}</text>'
    style = "<style>text{font:14px system-ui,sans-serif;fill:#777}</style>"
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}">{style}{body}</svg>\n'
    )
    Path(__file__).with_name("picture.svg").write_text(svg)


if __name__ == "__main__":
    main()
