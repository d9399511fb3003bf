"""Gate, subtraction or norm: which part of differential attention helps, at equal initial scale?

Every combination of a gate on the result, the subtraction of a second map and a head norm, on key-value recall and on
prose; beside them the published variants and controls. What is tested was fixed before the runs, in preregistration.md.

Command: ``diff-transformer study gate_norm_subtraction --corpus FOLDER --out runs/gate --minutes 60``, repeated until
it reports that all runs are finished. Hardware: two CPU cores, about ten hours for recall and five for prose.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
from prose.plan import LEARNING_RATES as PROSE_RATES
from prose.plan import base, final_loss
from recall.plan import CENTRE, LEARNING_RATES, setting, shortfall

from diff_transformer.lab.rows import RECALL
from diff_transformer.lab.stages import SWEPT, Stage

SETTINGS = ("p8_n2", "p8_n4")
SWEEP_SEEDS, FRESH_SEEDS, BLOCK = range(390, 393), range(400, 420), 4
PROSE_SWEEP_SEEDS, PROSE_SEEDS = (390, 391), range(400, 405)
# The constants of "diff_v2" (``with_matched_scale``), for the same cell with the second map added.
V2_SCALE = [1.8, 1.9]


def matched(variant: str) -> dict[str, Any]:
    """A side whose heads start with the Transformer's RMS."""
    return {"variant": variant, "head_scale": "matched"}


# Gate x subtraction x head norm.
CELLS: dict[str, dict[str, Any]] = {
    "softmax": {"variant": "softmax"},
    "softmax_norm": matched("softmax_norm"),
    "gated": matched("gated"),
    "gated_norm": matched("gated+gate=normed+head_norm=weighted"),
    "v2": matched("diff_v2"),
    "v2_norm": matched("diff_v2+head_norm=weighted"),
    "gate_v2": matched("diff_v2+gate=result"),
    "gate_v2_norm": matched("diff_v2+gate=normed+head_norm=weighted"),
}
BESIDE: dict[str, dict[str, Any]] = {
    "v2_added": {"variant": "diff_v2+subtract=false", "head_scale": V2_SCALE},
    "v2_published": {"variant": "diff_v2"},
    "v3_published": {"variant": "diff_v3"},
    "v3_half": matched("diff_v3+initial_ratio=0.5"),
    "v1_published": {"variant": "diff", "head_norm_init": 1.0},
    "v1": matched("diff"),
    "v3": matched("diff_v3"),
}
SIDES = CELLS | BESIDE
PRIMARY = ("softmax", "gated", "v2", "v2_norm", "gate_v2", "v2_added")  # sides of the primary outcome, which run first


def stages(corpus: str) -> list[Stage]:
    """``corpus``: a folder of books with train/ and val/ inside, for the runs on prose."""
    centre, prose = setting(CENTRE), base(corpus, "small")
    settings = {name: setting(name) for name in SETTINGS}
    blocks = [FRESH_SEEDS[start : start + BLOCK] for start in range(0, len(FRESH_SEEDS), BLOCK)]
    first = {name: SIDES[name] for name in PRIMARY}
    rest = {name: side for name, side in SIDES.items() if name not in PRIMARY}
    recall = [
        stage
        for sides in (first, rest)
        for stage in (
            Stage({"recall": centre}, sides, SWEEP_SEEDS, LEARNING_RATES, "sweep/{setting}_lr{rate:g}", (), shortfall),
            *(Stage(settings, sides, seeds, SWEPT, measure=(RECALL,)) for seeds in blocks),
        )
    ]
    return [
        *recall,
        Stage({"prose": prose}, CELLS, PROSE_SWEEP_SEEDS, PROSE_RATES, "sweep/{setting}_lr{rate:g}", (), final_loss),
        Stage({"prose": prose}, CELLS, PROSE_SEEDS, SWEPT, measure=("associative_recall", "long_nll")),
    ]
