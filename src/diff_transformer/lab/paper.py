"""The paper's numbers [arXiv 2410.05258], Transformer / DIFF, once: claims, pages and benchmarks have them from here.

Those marked with a dagger in a sentence come from a third party's transcription.
"""

from statistics import fmean

Two = tuple[float, float]

LOSSES: dict[str, Two] = {"validation": (3.087, 3.062), "ar_hit": (0.898, 0.880), "others": (3.272, 3.247)}  # Table 6
NEEDLES: dict[tuple[int, int], Two] = {
    (1, 1): (1.00, 1.00),
    (2, 2): (0.85, 0.92),
    (4, 2): (0.62, 0.84),
    (6, 2): (0.55, 0.85),
}
DEPTHS = (0, 25, 50, 75, 100)
ALLOCATION = {  # Table 3, by depth
    "answer": ((0.03, 0.03, 0.03, 0.07, 0.09), (0.27, 0.30, 0.31, 0.32, 0.40)),
    "noise": ((0.51, 0.54, 0.52, 0.49, 0.49), (0.01, 0.02, 0.02, 0.02, 0.01)),
}
OUTLIERS: dict[str, tuple[Two, Two]] = {  # Table 5: largest value, median
    "logits": ((318.0, 38.8), (5.4, 3.3)),
    "hidden": ((3608.6, 1688.2), (0.6, 1.2)),
}
THROUGHPUT: dict[tuple[str, int], dict[str, Two]] = {  # Table 7: tokens/s on an H100
    ("3B", 2048): {"forward_backward": (7247, 6635), "prefill": (51228, 46811)},
    ("3B", 4096): {"forward_backward": (7491, 6718), "prefill": (48762, 44521)},
    ("13.1B", 2048): {"forward_backward": (998, 942), "prefill": (14346, 13653)},
}
SHOTS = {"TREC": 18.0, "TREC-fine": 21.6, "Banking-77": 10.4, "Clinic-150": 5.2}  # Figure 6: gain in points
ORDERS: dict[str, Two] = {"random": (19.0, 4.0), "alternate": (56.7, 13.4)}  # Figure 7: best less worst, points
HALLUCINATION: dict[str, Two] = {  # Table 4
    "XSum": (0.44, 0.53), "CNN/DM": (0.32, 0.41), "MultiNews": (0.42, 0.61), "Qasper": (0.28, 0.39),
    "HotpotQA": (0.36, 0.46), "2WikiMultihopQA": (0.29, 0.36),
}  # fmt: skip
SCALING = (
    (6.8, 11, 62.2),
    (7.8, 13.1, 59.5),
    (160, 251, 63.7),
)  # Figure 3, in 1e9: parameters twice, tokens


def two(values: tuple[float, float], form: str = ".2f") -> str:
    return " / ".join(f"{value:{form}}" for value in values)


def loss(part: str) -> str:
    return f"{two(LOSSES[part], '.3f')} † (1.4B)"


def shots() -> str:
    return f"mean gain {min(SHOTS.values())} to {max(SHOTS.values())} points † (64K)"


def order(kind: str) -> str:
    return f"{two(ORDERS[kind], '.1f')} points † (TREC)"


def needles(cell: tuple[int, int]) -> str:
    """The paper's part of a claim about a cell of Table 2."""
    numbers = two(NEEDLES[cell]) if cell in NEEDLES else f"not reported; (6, 2): {two(NEEDLES[6, 2])}"
    return f"{numbers} † (4K, 3B)"


def allocation(part: str) -> str:
    transformer, diff = ALLOCATION[part]
    return f"{two((fmean(transformer), fmean(diff)))} (mean of depths)"


def outliers(kind: str) -> tuple[str, str]:
    """Largest values, and these in medians."""
    top, median = OUTLIERS[kind]
    return f"{two(top, '.1f')} †", f"{two((top[0] / median[0], top[1] / median[1]), '.0f')} † (its quotients)"


def throughput() -> str:
    both = [two(THROUGHPUT["3B", length]["forward_backward"], ".0f") for length in (2048, 4096)]
    return f"{' and '.join(both)} tokens/s †"


def hallucination() -> str:
    sides = zip(*HALLUCINATION.values(), strict=True)
    return " / ".join(f"{min(side):.2f} to {max(side):.2f}" for side in sides) + " †"


def _row(values, form: str = ".2f") -> str:
    return " ".join(f"{value:{form}}" for value in values)


def _sides(cells, form: str) -> list[str]:
    return [_row(side, form) for side in zip(*cells, strict=True)]


def _slower(length: int) -> list[str]:
    return [f"{100 * (theirs / ours - 1):.0f} %" for theirs, ours in THROUGHPUT["3B", length].values()]


_LOSS, _NEEDLES = _sides(LOSSES.values(), ".3f"), _sides(NEEDLES.values(), ".2f")
_LOGITS, _HIDDEN = (list(zip(*OUTLIERS[kind], strict=True)) for kind in ("logits", "hidden"))
_SIZES, _MORE_SIZES, _TOKENS = SCALING
_SHOTS = [f"{gain} on {name}" for name, gain in SHOTS.items()]

# What pages say "in the paper", by the experiment or the figure.
SAID = {
    "allocation": f"at depths {', '.join(map(str, DEPTHS))} %, answer: Transformer {_row(ALLOCATION['answer'][0])}, "
    f"DIFF {_row(ALLOCATION['answer'][1])}; noise: {' and '.join(map(_row, ALLOCATION['noise']))}.",
    "gradient_flow": "the appendix derives the gradients in closed form and concludes that magnitudes are equal; it "
    "reports no numbers.",
    "hallucination": "a chat model judges 100 outputs per set, Transformer / DIFF †: "
    f"{', '.join(f'{name} {two(shares)}' for name, shares in HALLUCINATION.items())}.",
    "harness": "zero-shot at 3 B and 1 T tokens †, ARC-C ARC-E BoolQ HellaSwag OBQA PIQA WinoGrande, mean: DIFF 37.8 "
    "72.9 69.0 71.4 29.0 76.8 67.1, 60.6; OpenLLaMA-v2-3B 57.5, StableLM-base-alpha-3B-v2 56.8.",
    "lambda": "lambda starts near 0.8 − 0.6 exp(−0.3 (l − 1)) for layer l = 1, 2, …: 0.20, 0.36, 0.47 in the first "
    "three layers, and close to 0.8 in deep ones.",
    "long_nll": "at 3 B, with continued training to 64 K tokens, both curves keep falling to the end, and DIFF's is "
    "the lower.",
    "associative_recall": f"at 1.4 B †, all tokens, AR-Hit, others: Transformer {_LOSS[0]}, DIFF {_LOSS[1]}.",
    "losses": f"{_SIZES[0]} B parameters of DIFF reach the loss of an {_SIZES[1]} B Transformer, and {_TOKENS[0]} B "
    f"tokens reach that of {_TOKENS[1]} B.",
    "many_shot": f"at 3 B and up to 64 K tokens, DIFF leads by {SHOTS['TREC']} points on TREC, {_SHOTS[1]}, "
    f"{_SHOTS[2]} and {_SHOTS[3]} †. On TREC its best and worst order differ by {ORDERS['random'][1]} points (random) "
    f"and {ORDERS['alternate'][1]} (by class); for the Transformer by {ORDERS['random'][0]} and "
    f"{ORDERS['alternate'][0]} †.",
    "needle": f"at 3 B and 4 K tokens, (N, R) = {' '.join(map(str, NEEDLES))}: Transformer {_NEEDLES[0]}, DIFF "
    f"{_NEEDLES[1]} †; from 8 K to 64 K tokens with (8, 1), DIFF leads by 0.76 at 25 % depth in 64 K.",
    "outliers": f"largest value and median at 3 B †: logits {_LOGITS[0][0]:.0f} and {_LOGITS[0][1]} in the "
    f"Transformer, {_LOGITS[1][0]} and {_LOGITS[1][1]} in DIFF; hidden states {_HIDDEN[0][0]:.0f} and {_HIDDEN[0][1]}, "
    f"{_HIDDEN[1][0]:.0f} and {_HIDDEN[1][1]}.",
    "quantization": "zero-shot accuracy on HellaSwag at 3 B: DIFF keeps its accuracy from 16 to 6 bits, where the "
    "Transformer's drops. At 4 bits, DIFF is near the Transformer at 6 bits and about 0.25 above it at 4.",
    "scaling": f"{_SIZES[0]} B parameters of DIFF have the loss of an {_SIZES[1]} B Transformer ({_SIZES[2]} %), "
    f"{_MORE_SIZES[0]} B that of {_MORE_SIZES[1]} B ({_MORE_SIZES[2]} %), and {_TOKENS[0]} B tokens that of "
    f"{_TOKENS[1]} B ({_TOKENS[2]} %).",
    "throughput": f"3 B at 2 K tokens on H100 †: DIFF is {_slower(2048)[0]} slower in training and in the forward "
    f"pass; at 4 K, {' and '.join(_slower(4096))}.",
}  # fmt: skip
