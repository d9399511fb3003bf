"""The models that are compared, by side: which are the pair and the control, and what each is called everywhere."""

from collections.abc import Iterable

PAIR = ("diff", "softmax")
BASELINE = "softmax"
CONTROL = "softmax_norm"  # what the head norm gives without the subtraction
WIDER = "wider"  # of a pretrained Transformer: what more parameters give
CONTROLS = (CONTROL, WIDER, "attention", "lora")  # the last: other ways to train a pretrained Transformer
SOURCE = "source"  # a pretrained Transformer before anything is trained
NAMES = {
    "diff": "DIFF",
    "softmax": "Transformer",
    "softmax_norm": "Transformer + head norm",
    "diff_v2": "DIFF V2",
    "diff_v3": "DIFF V3",
    "gated": "gated Transformer",
    "grouped_diff": "Grouped DIFF",
    "dint": "DINT",
    "fixed_lambda": "DIFF, fixed lambda",
    "softmax_wide": "Transformer, half the heads, twice as wide",
    "softmax_wide_norm": "Transformer + head norm, half the heads, twice as wide",
    "diff_no_norm": "DIFF without head norm",
    "diff_lambda_0.8": "DIFF, lambda_init 0.8",
    "diff_lambda_0.5": "DIFF, lambda_init 0.5",
    "diff_norm1": "DIFF as published",
    "diff_matched": "DIFF, matched scale",
    "diff_same_rate": "DIFF, the Transformer's rate",
    "diff_lambda0": "DIFF, lambda = 0",
    "softmax_norm1": "Transformer + head norm initialised at 1",
    "softmax_norm_own_scale": "Transformer + head norm, own scale",
    "diff_lambda0_own_scale": "DIFF, lambda = 0, matched scale",
    "softmax_diff_rate": "Transformer, DIFF's rate",
    "gated_norm": "gated Transformer + head norm",
    "v2": "DIFF V2, matched scale",
    "v2_norm": "DIFF V2 + head norm",
    "gate_v2": "DIFF V2 + gate",
    "gate_v2_norm": "DIFF V2 + gate + head norm",
    "v2_added": "DIFF V2, second map added",
    "v2_published": "DIFF V2 as published",
    "v3_published": "DIFF V3 as published",
    "v3_half": "DIFF V3, initial ratio 1/2",
    "v1_published": "DIFF as published",
    "v1": "DIFF, matched scale",
    "v3": "DIFF V3, matched scale",
    "wider": "wider Transformer",
    "attention": "Transformer, attention alone trained",
    "lora": "Transformer, adapters trained (LoRA)",
    "dex": "DEX",
    "source": "Transformer before training",
}


def name_of(side: str) -> str:
    """The name of a side, or the side itself if it has none."""
    return NAMES.get(side, side)


def in_order(sides: Iterable[str]) -> list[str]:
    """DIFF first, then its Transformer, controls and relatives, then all others in the given order."""
    known = list(NAMES)
    return sorted(sides, key=lambda side: known.index(side) if side in known else len(known))
