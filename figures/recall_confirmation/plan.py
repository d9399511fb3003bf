"""Four sides of the recall study again, on thirty fresh seeds. What is tested was fixed before, in preregistration.md.

Command: ``diff-transformer study recall_confirmation --out runs/confirmation --minutes 60``, repeated until it reports
that all 360 runs are finished. Hardware: two CPU cores, about two hours.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))
from recall.plan import CHOSEN, SIDES, setting

from diff_transformer.lab.rows import RECALL
from diff_transformer.lab.stages import Stage

# The settings that tell the accuracies of the pair apart, on seeds that no choice of the recall study has seen.
INFORMATIVE = ("p8_n2", "p8_n4", "p4_n4")
CONFIRMED = ("softmax", "diff_norm1", "diff_matched", "softmax_norm_own_scale")
FRESH_SEEDS = range(200, 230)


def stages(corpus: str) -> list[Stage]:
    """Not read: ``corpus``."""
    settings = {name: setting(name) for name in INFORMATIVE}
    return [Stage(settings, {side: SIDES[side] for side in CONFIRMED}, FRESH_SEEDS, CHOSEN, measure=(RECALL,))]
