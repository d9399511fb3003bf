"""Record the study at 33M parameters, and make its tables from the record. Usage: figures/study.py."""

import sys
from pathlib import Path
from statistics import fmean

from diff_transformer.lab.record import Cells
from diff_transformer.lab.stages import load_stages
from diff_transformer.lab.stats import over_seeds

HERE = Path(__file__).resolve().parent
FINDINGS = HERE.parents[1] / "docs" / "findings.md"
sys.path.insert(0, str(HERE.parent))
from scale.plan import SIDES  # noqa: E402  (beside this folder)
from study import counted, study_command  # noqa: E402
from tables import in_numbers  # noqa: E402

NAMES = {
    "softmax": "Transformer",
    "diff_norm1": "DIFF as published",
    "diff_matched": "DIFF, matched scale",
    "softmax_norm_own_scale": "Transformer + head norm",
    "diff_v2": "DIFF V2",
}
BASELINES = ("softmax", "softmax_norm_own_scale")
NEEDLES = ("n4_r2", "n6_r2")
PRIMARY = {
    "held-out loss": ("associative_recall", "validation"),
    "accuracy: 2 of 4 and 2 of 6 needles": ("needle", *NEEDLES),
}
MEASURES = PRIMARY | {
    "attention on the answer": ("allocation", "answer"),
    "attention on noise": ("allocation", "noise"),
    "loss on repeated n-grams": ("associative_recall", "ar_hit"),
    "loss up to token 4096": ("long_nll", "nll4096"),
    "largest attention logit": ("outliers", "logits_top1"),
    "largest hidden value": ("outliers", "hidden_top1"),
}


def differences(cells: Cells, setting: str = "books", measures: dict[str, tuple] = MEASURES) -> str:
    """Each measure of each side; below it, the differences from both baselines, seed by seed and their mean.

    Only seeds with all their runs count; a run that diverged was not measured, and its seed is left out and named.
    """
    found = cells.get(setting, {})
    whole = sorted(set.intersection(*(set(found.get(side, {})) for side in SIDES)))
    diverged = {f"{NAMES[side]}, seed {seed}": seed for seed in whole for side in SIDES if found[side][seed].diverged}
    lines = [f"Diverged: {'; '.join(diverged)}.", ""] if diverged else []
    seeds = [seed for seed in whole if seed not in diverged.values()]
    if not seeds:
        return "\n".join(lines)
    about = "one run of each side" if len(seeds) == 1 else f"{len(seeds)} seeds, paired; 95 % CI; each seed"
    heads = [f"`{setting}`: {about}", *(NAMES[side] for side in SIDES)]
    lines += [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, (experiment, *keys) in measures.items():
        values = {
            side: [fmean(found[side][seed].metrics[experiment][key] for key in keys) for seed in seeds]
            for side in SIDES
        }
        lines.append(f"| {name} | {' | '.join(f'{fmean(values[side]):.3f}' for side in SIDES)} |")
        for baseline in BASELINES:
            paired = {side: [a - b for a, b in zip(values[side], values[baseline], strict=True)] for side in SIDES}
            shown = ("" if side in BASELINES else _said(paired[side]) for side in SIDES)
            lines.append(f"| difference from {NAMES[baseline]} | {' | '.join(shown)} |")
    return "\n".join(lines)


def _said(each: list[float]) -> str:
    one_by_one = f"; {', '.join(f'{value:+.3f}' for value in each)}" if len(each) > 1 else ""
    return in_numbers(over_seeds(each)) + one_by_one


def tables(cells: Cells) -> str:
    """What stands between the README's markers."""
    main, twice = load_stages("scale")
    done = counted(cells, {"the three seeds": [main], "twice the rate": [twice]})
    return "\n\n".join(filter(None, [done, differences(cells), differences(cells, "books_twice")]))


if __name__ == "__main__":
    pages = {
        HERE / "README.md": ("measured", tables),
        FINDINGS: ("scale", lambda cells: differences(cells, measures=PRIMARY)),
    }
    sys.exit(study_command(sys.argv[1:], HERE, pages, lambda cells: {}, curves={"training", "validation"}))
