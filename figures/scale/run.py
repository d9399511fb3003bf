"""Record the study at 33M parameters, and make its tables from the record. Usage: figures/study.py."""

import sys
from pathlib import Path
from statistics import fmean

from diff_transformer.lab.measures import Measure, compared, metric
from diff_transformer.lab.record import Cells
from diff_transformer.lab.stages import load_stages

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from scale.plan import SIDES  # noqa: E402  (beside this folder)
from study import counted, study_command  # noqa: E402
from tables import interval  # noqa: E402

NAMES = {
    "softmax": "Transformer",
    "diff_norm1": "DIFF as published",
    "diff_matched": "DIFF from the Transformer's scale",
    "softmax_norm_own_scale": "Transformer + head norm",
    "diff_v2": "DIFF V2",
}
BASELINES = ("softmax", "softmax_norm_own_scale")
NEEDLES = ("n4_r2", "n6_r2")
MEASURES: dict[str, Measure] = {
    "held-out loss": metric("associative_recall", "validation", "lower", "held-out loss"),
    "needles: mean of (4, 2) and (6, 2)": Measure(
        "needles", lambda record: fmean(record.metrics["needle"][name] for name in NEEDLES), "higher"
    ),
    "attention on the answer": metric("allocation", "answer", "higher", "answer"),
    "attention on noise": metric("allocation", "noise", "lower", "noise"),
    "loss on repeated n-grams": metric("associative_recall", "ar_hit", "lower", "AR-Hit"),
    "loss up to token 4096": metric("long_nll", "nll4096", "lower", "nll4096"),
    "largest attention logit": metric("outliers", "logits_top1", "lower", "logits"),
    "largest activation": metric("outliers", "hidden_top1", "lower", "hidden"),
}  # fmt: skip


def differences(cells: Cells, setting: str = "books") -> str:
    """Each measure of each side; below it, the differences from both baselines, over whole seeds alone."""
    found = cells.get(setting, {})
    seeds = sorted(set.intersection(*(set(found.get(side, {})) for side in SIDES)))
    if not seeds:
        return ""
    about = "one run of each side" if len(seeds) == 1 else f"{len(seeds)} seeds, paired; 95 % interval"
    heads = [f"`{setting}`: {about}", *(NAMES[side] for side in SIDES)]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, measure in MEASURES.items():
        values = {side: [measure.read(found[side][seed]) for seed in seeds] for side in SIDES}
        lines.append(f"| {name} | {' | '.join(f'{fmean(values[side]):.3f}' for side in SIDES)} |")
        for baseline in BASELINES:
            cell = []
            for side in SIDES:
                paired = [mine - theirs for mine, theirs in zip(values[side], values[baseline], strict=True)]
                row = compared(name, fmean(values[baseline]), fmean(values[side]), paired, measure.better)
                cell.append("" if side in BASELINES else interval(row))
            lines.append(f"| difference from {NAMES[baseline]} | {' | '.join(cell)} |")
    return "\n".join(lines)


def tables(cells: Cells) -> str:
    """What stands between the README's markers."""
    main, twice = load_stages("scale")
    done = counted(cells, {"the three seeds": [main], "twice the rate": [twice]})
    return "\n\n".join(filter(None, [done, differences(cells), differences(cells, "books_twice")]))


if __name__ == "__main__":
    pages = {HERE / "README.md": ("measured", tables)}
    sys.exit(study_command(sys.argv[1:], HERE, pages, lambda cells: {}, curves={"training", "validation"}))
