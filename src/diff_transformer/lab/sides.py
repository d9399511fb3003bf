"""The models that are compared, by side: which are the pair and the control, and what each is called everywhere."""

PAIR = ("diff", "softmax")
BASELINE = "softmax"
CONTROL = "softmax_norm"  # what the head norm gives without the subtraction
WIDER = "wider"  # of a pretrained Transformer: what more parameters give
CONTROLS = (CONTROL, WIDER)
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
    "wider": "wider Transformer",
    "source": "Transformer before training",
}


def name_of(side: str) -> str:
    """The name of a side, or the side itself if it has none."""
    return NAMES.get(side, side)
