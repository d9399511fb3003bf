"""Record the study of a pretrained model, and make its tables from the record. Usage: figures/study.py."""

import sys
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from recall_confirmation.run import bootstrapped, p_value  # noqa: E402  (beside this folder)
from study import study_command  # noqa: E402
from tables import in_numbers  # noqa: E402
from uptraining_real import evals  # noqa: E402
from uptraining_real.train import CELLS, SEEDS, SETTING  # noqa: E402

from diff_transformer.lab.record import Cells, Record  # noqa: E402
from diff_transformer.lab.sides import SOURCE, name_of  # noqa: E402
from diff_transformer.lab.stats import over_seeds  # noqa: E402

ARMS = ("softmax", "wider", "diff_v2", "diff")
PAIRS = (("diff_v2", "softmax"), ("diff_v2", "wider"), ("diff", "softmax"), ("diff", "wider"))  # tested in this order
NAMES = {arm: name_of(arm) for arm in (*ARMS, SOURCE)} | {"softmax": "Transformer, trained further"}
SECONDARY = {
    "loss on other books": ("associative_recall", "validation"),
    "attention on the answer": ("allocation", "answer"),
    "attention on the noise": ("allocation", "noise"),
    "largest attention logit": ("outliers", "logits_top1"),
    "largest hidden value": ("outliers", "hidden_top1"),
}


def whole_seeds(cells: Cells) -> list[int]:
    """The seeds with all four arms, which alone count."""
    sides = cells.get(SETTING, {})
    return [seed for seed in range(SEEDS) if all(seed in sides.get(arm, {}) for arm in ARMS)]


def accuracy(record: Record) -> float:
    """Mean over the cells of the primary outcome."""
    return fmean(record.metrics["needle"][f"n{n}_r{r}"] for n, r in CELLS)


def differences(cells: Cells, side: str, baseline: str, seeds: list[int]) -> list[float]:
    sides = cells[SETTING]
    return [accuracy(sides[side][seed]) - accuracy(sides[baseline][seed]) for seed in seeds]


def verdicts(found: list[list[float]], finished: bool) -> list[str]:
    """By the fixed sequence: a difference is tested at 0.05 if all before it were significant."""
    said, open_ = [], True
    for each in found:
        low, high = bootstrapped(each)
        significant = p_value(each) <= 0.05 and not low <= 0 <= high
        if not finished:
            said.append("not finished")
        elif not open_:
            said.append("not tested")
        else:
            said.append(("held" if low > 0 else "did not hold") if significant else "undecided")
        open_ = open_ and significant
    return said


def primary(cells: Cells) -> str:
    """The four differences; "" before three whole seeds."""
    seeds = whole_seeds(cells)
    if len(seeds) < 3:
        return ""
    found = [differences(cells, *pair, seeds) for pair in PAIRS]
    head = f"| | difference (bootstrap, {len(seeds)} seeds) | Student's interval | p | verdict |"
    lines = ["**Primary outcome**: accuracy with 4 and 6 needles, 2 asked for", "", head, "|---" * 5 + "|"]
    said = verdicts(found, len(seeds) == SEEDS)
    for (side, baseline), each, verdict in zip(PAIRS, found, said, strict=True):
        low, high = bootstrapped(each)
        lines.append(
            f"| {NAMES[side]} minus {NAMES[baseline]} | {fmean(each):+.3f} ({low:+.3f} to {high:+.3f}) | "
            f"{in_numbers(over_seeds(each))} | {p_value(each):.3f} | {verdict} |"
        )
    return "\n".join(lines)


def measures(cells: Cells) -> str:
    """Every arm's means over the whole seeds, and the source's before training."""
    seeds, sides = whole_seeds(cells), cells.get(SETTING, {})
    if not seeds or SOURCE not in sides:
        return ""
    columns = {SOURCE: [*sides[SOURCE].values()]} | {arm: [sides[arm][seed] for seed in seeds] for arm in ARMS}
    rows = {f"{n} needles, {r} asked for": ("needle", f"n{n}_r{r}") for n, r in CELLS} | SECONDARY
    said = "One run of each arm" if len(seeds) == 1 else f"Means over {len(seeds)} seeds"
    lines = [
        f"**{said}**",
        "",
        f"| | {' | '.join(NAMES[side] for side in columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for name, (experiment, key) in rows.items():
        means = [fmean(one.metrics[experiment][key] for one in records) for records in columns.values()]
        lines.append(f"| {name} | {' | '.join(f'{mean:.3f}' for mean in means)} |")
    return "\n".join(lines)


def tables(cells: Cells) -> str:
    """What stands between the README's markers."""
    done = sum(len(cells.get(SETTING, {}).get(arm, {})) for arm in ARMS)
    said = "" if len(whole_seeds(cells)) == SEEDS else "; nothing is decided"
    progress = f"Finished: {done} of {len(ARMS) * SEEDS} runs of the plan{said}."
    return "\n\n".join(part for part in (progress, primary(cells), measures(cells), evals.table(NAMES)) if part)


if __name__ == "__main__":
    pages = {HERE / "README.md": ("measured", tables)}
    sys.exit(study_command(sys.argv[1:], HERE, pages, lambda cells: {}, curves=("validation",)))
