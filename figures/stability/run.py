"""Record the stability study, and make its table and plot from the record.

python figures/stability/run.py runs/stability   # record what is finished there, then the rest
python figures/stability/run.py                  # table and plot again from measured.json
python figures/stability/run.py --check          # exit 1 if the README's table differs from measured.json
"""

import sys
from pathlib import Path
from statistics import fmean

from diff_transformer.lab.record import Cells

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from plots import NAMES, stability_charts  # noqa: E402  (both stand beside this folder)
from study import study_command  # noqa: E402


def table(cells: Cells) -> str:
    lines = ["![Gradient norms, spikes and loss by learning rate](stability.svg)", ""]
    lines += ["| learning rate | side | runs | diverged | spikes a run | largest norm | median norm | final loss |"]
    lines.append("|---|---|---|---|---|---|---|---|")
    for rate in sorted(cells, key=lambda name: float(name.removeprefix("lr"))):
        for side in [name for name in NAMES if name in cells[rate]]:
            records = list(cells[rate][side].values())
            gradients = [record.metrics["gradients"] for record in records]
            losses = [record.final_loss for record in records if not record.diverged]
            cells_of_row = (
                rate.removeprefix("lr"),
                NAMES[side],
                str(len(records)),
                str(sum(bool(record.diverged) for record in records)),
                f"{fmean(g['spikes'] for g in gradients):.1f}",
                f"{max(g['largest'] for g in gradients):.2f}",
                f"{fmean(g['median'] for g in gradients):.2f}",
                f"{fmean(losses):.3f}" if losses else "",
            )
            lines.append(f"| {' | '.join(cells_of_row)} |")
    return "\n".join(lines)


PAGES = {HERE / "README.md": ("measured", table)}

if __name__ == "__main__":
    sys.exit(study_command(sys.argv[1:], HERE, PAGES, stability_charts))
