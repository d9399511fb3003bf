"""Record the desk study, and make its tables and plots from the record.

python figures/desk/run.py runs/desk             # record what is finished there, then the rest
python figures/desk/run.py                       # tables and plots again from measured.json
python figures/desk/run.py --check               # exit 1 if the README's tables differ from measured.json
python figures/desk/run.py --restore runs/desk   # the recorded cells as a folder that the study goes on with
"""

import sys
from pathlib import Path

from diff_transformer.lab.measures import (
    MEASURES,
    borrow_baselines,
    final_loss,
    paired_rows,
    spread,
    tokens_to_equal_loss,
    trained,
)
from diff_transformer.lab.record import Cells

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from plots import NAMES, SETTINGS, desk_charts, lead_charts, lead_table, objective_charts  # noqa: E402  (beside this folder)
from study import study_command  # noqa: E402
from tables import interval, table  # noqa: E402

DEPTHS = (0, 25, 50, 75, 100)
# Where a Transformer + head norm stands, which one, and where DIFF at the same rate does.
NORMED = (
    ("ablation", "softmax_norm", "novels", "diff_same_rate"),
    ("ablation", "softmax_wide_norm", "novels", "diff_same_rate"),
    ("wide", "softmax_norm", "wide", "diff"),
    ("long", "softmax_norm", "long", "diff"),
)


def tables(cells: Cells) -> str:
    """What stands between the README's markers."""
    if "novels" not in cells:
        done = sum(len(seeds) for sides in cells.values() for seeds in sides.values())
        return f"Of the study only {done} runs of the sweep are finished.\n\n{sweep(cells)}"
    parts = ["![Loss and retrieval in the main setting](novels.svg)", "![Differences in loss](differences.svg)"]
    parts += ["![The objective and its halves, difference from the Transformer, during training](objective.svg)"]
    parts += ["![DIFF's loss, difference from the Transformer while they are trained](lead.svg)", lead_table(cells)]
    parts.append(overview(cells))
    for setting in [name for name in SETTINGS if name in cells]:
        for side in [name for name in NAMES if name in cells[setting] and name != "softmax"]:
            rows = paired_rows(borrow_baselines(cells), setting, side, MEASURES)
            if rows and (side == "diff" or setting == "novels"):
                parts.append(table(f"{SETTINGS[setting]}: {NAMES[side]}", rows))
    parts += [against_normed(cells, *pair) for pair in NORMED]
    parts += [by_depth(cells), sweep(cells)]
    return "\n\n".join(part for part in parts if part)


def against_normed(cells: Cells, where: str, baseline: str, home: str, side: str) -> str:
    """DIFF less a Transformer + head norm: its heads as they are, or as many and as wide as DIFF's (Table 6)."""
    normed, ours = cells.get(where, {}).get(baseline, {}), cells.get(home, {}).get(side, {})
    rows = paired_rows({"": {"softmax": normed, "diff": ours}}, "", "diff", MEASURES)
    size = "one learning rate" if home == "novels" else SETTINGS[home]
    return table(f"{NAMES['diff']}, beside a {NAMES[baseline]}, {size}", rows) if rows else ""


def overview(cells: Cells) -> str:
    """One line a setting and side: final validation loss and what it takes to reach the Transformer's."""
    heads = ("setting", "side", "seeds", "validation loss", "difference from the Transformer", "verdict")
    heads += ("tokens to its loss", "tokens to its loss on needles")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for setting in [name for name in SETTINGS if name in cells]:
        compared = borrow_baselines(cells)
        sides = compared[setting]
        for side in [name for name in NAMES if name in cells[setting]]:
            kept = trained(sides[side])
            lost = len(sides[side]) - len(kept)
            seeds = f"{len(kept)}, {lost} diverged" if lost else f"{len(kept)}"
            mean, deviation = spread([final_loss().read(record) for record in kept.values()])
            more = ["", "", "", ""]
            rows = paired_rows(compared, setting, side, [final_loss()]) if side != "softmax" else []
            if rows:
                more = [interval(rows[0]), rows[0].verdict, *(reached(sides, side, of) for of in (None, "needles"))]
            line = (setting, NAMES[side], seeds, f"{mean:.3f} (sd {deviation:.3f})", *more)
            lines.append(f"| {' | '.join(line)} |")
    named = "\n".join(f"- {name}: {said}" for name, said in SETTINGS.items() if name in cells)
    return "\n".join(lines) + "\n\n" + named


def reached(sides: dict[str, dict[int, dict]], side: str, source: str | None) -> str:
    """The mean share of the Transformer's tokens after which ``side`` has its final loss, and in how many runs."""
    ours, theirs = trained(sides[side]), trained(sides["softmax"])
    pairs = [(ours[seed], theirs[seed]) for seed in ours if seed in theirs]
    shares = [tokens_to_equal_loss(ours, theirs, source) for ours, theirs in pairs]
    known = [share for share in shares if share is not None]
    if not known:
        return "none gets there"
    return f"{sum(known) / len(known):.2f} ({len(known)} of {len(shares)} get there)"


def by_depth(cells: Cells) -> str:
    """Accuracy by where the first needle stands, means over seeds of the main setting."""
    sides = cells.get("novels", {})
    lines = [
        "**Retrieval by depth of the needle**",
        "",
        f"| needles, asked for | | {' | '.join(f'{d} %' for d in DEPTHS)} |",
    ]
    lines.append("|---" * (len(DEPTHS) + 2) + "|")
    for n, r in ((1, 1), (2, 1), (4, 1), (4, 2)):
        for side in [name for name in ("softmax", "diff", "diff_same_rate", "diff_norm1") if name in sides]:
            scores = [
                [record.metrics["needle"][f"n{n}_r{r}_depth{depth}"] for record in trained(sides[side]).values()]
                for depth in DEPTHS
            ]
            lines.append(f"| {n}, {r} | {NAMES[side]} | {' | '.join(f'{sum(s) / len(s):.2f}' for s in scores)} |")
    return "\n".join(lines) if sides else ""


def sweep(cells: Cells) -> str:
    """The learning rates tried for each side (one seed, 600 steps)."""
    found = {name.removeprefix("sweep/lr"): sides for name, sides in cells.items() if name.startswith("sweep/")}
    if not found:
        return ""
    rates = sorted(found, key=float)
    lines = ["**Learning rates** (validation loss after 600 steps, one seed)", "", f"| | {' | '.join(rates)} |"]
    lines.append("|---" * (len(rates) + 1) + "|")
    for side in ("softmax", "diff", "diff_norm1", "diff_v2"):
        losses = [next((f"{r.final_loss:.3f}" for r in found[rate].get(side, {}).values()), "") for rate in rates]
        lines.append(f"| {NAMES[side]} | {' | '.join(losses)} |")
    return "\n".join(lines)


# File -> what stands between its markers, and how these are called.
PAGES = {HERE / "README.md": ("measured", tables)}


def charts(cells: Cells) -> dict:
    return desk_charts(cells) | lead_charts(cells) | objective_charts(cells)


if __name__ == "__main__":
    sys.exit(study_command(sys.argv[1:], HERE, PAGES, charts))
