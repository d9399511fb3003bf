"""Record the stability study, and make its table and plot from the record.

python figures/stability/run.py runs/stability   # record what is finished there, then the rest
python figures/stability/run.py                  # table and plot again from measured.json
python figures/stability/run.py --check          # exit 1 if the README's table differs from measured.json
"""

import re
import sys
from pathlib import Path
from statistics import fmean

from diff_transformer.lab.record import Cells

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from plots import NAMES, stability_charts, write  # noqa: E402  (both stand beside this folder)
from record import cells_of, keep_study  # noqa: E402


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


def filled(cells: Cells) -> str:
    text = (HERE / "README.md").read_text()
    return re.sub(r"(?<=<!-- measured -->\n).*?(?=\n<!-- /measured -->)", lambda _: table(cells), text, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] != "--check":
        keep_study(Path(arguments[0]), HERE / "measured.json")
    if not (HERE / "measured.json").exists():
        return 0
    cells = cells_of(HERE)
    if arguments == ["--check"]:
        stale = (HERE / "README.md").read_text() != filled(cells)
        if stale:
            print("figures/stability/README.md differs from its measured.json")
        return int(stale)
    (HERE / "README.md").write_text(filled(cells))
    write(stability_charts(cells), HERE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
