"""The desk study's sizes as a table of runs, and the law of Figure 3 fitted to it."""

from diff_transformer.lab.record import Cells, Record
from diff_transformer.lab.run_tables import Run, runs_of_record
from diff_transformer.lab.scaling import Settings, evaluate_scaling

SIZES = ("narrow", "novels", "wide")  # settings that differ in size alone
SIDES = ("softmax", "diff")
SAME_RATE = {("novels", "diff"): "diff_same_rate"}  # elsewhere all models have the Transformer's learning rate


def scaling_runs(cells: Cells) -> list[Run]:
    """The runs of every seed of every size, at one learning rate for both models."""
    return [run for setting in SIZES for side in SIDES for run in _of(cells, setting, side)]


def records(cells: Cells, setting: str, side: str) -> list[Record]:
    """What the seeds of ``side`` left, at the learning rate of both models."""
    return list(cells.get(setting, {}).get(SAME_RATE.get((setting, side), side), {}).values())


def _of(cells: Cells, setting: str, side: str) -> list[Run]:
    return [run for record in records(cells, setting, side) for run in runs_of_record(record, side)]


def matched(cells: Cells) -> list[str]:
    """Parts of the page: mean loss by size, and the share of the Transformer's parameters that DIFF needs."""
    runs = [run for run in scaling_runs(cells) if run.part == "final"]
    sizes = sorted({run.parameters for run in runs if run.model == "softmax"})
    if len(sizes) < 2:
        return []
    lines = ["| parameters | Transformer | DIFF |", "|---|---|---|"]
    for setting in SIZES:
        both = [[run for run in _of(cells, setting, side) if run.part == "final"] for side in SIDES]
        if all(both):
            means = (f"{sum(run.loss for run in found) / len(found):.3f}" for found in both)
            lines.append(f"| {both[0][0].parameters / 1e6:.2f}M | {' | '.join(means)} |")
    form = "offset" if len(sizes) > 2 else "plain"
    found = evaluate_scaling(runs, Settings(form=form)).metrics
    law = "a x^-b + c" if form == "offset" else "a x^-b (two sizes leave no room for c)"
    said = [
        _said(found, kind, size)
        for kind, size in (("ours", "DIFF's largest"), ("reference", "the Transformer's largest"))
    ]
    return [
        "\n".join(lines),
        f"By {law}, fitted to the runs of {len(sizes)} sizes: " + "; ".join(filter(None, said)) + ".",
    ]


def _said(found: dict[str, float], kind: str, size: str) -> str:
    for key, how in (
        (f"parameters_ratio_from_{kind}", ""),
        (f"parameters_ratio_from_{kind}_extrapolated", ", extrapolated"),
    ):
        if key in found:
            low, high = found.get(f"{key}_low"), found.get(f"{key}_high")
            spread = "" if low is None else f" ({low:.2f} to {high:.2f})"
            return f"DIFF needs {found[key]:.2f}{spread} of the parameters at {size} matched size{how}"
    return ""
