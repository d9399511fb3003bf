"""Fill the folders of the paper's tables and figures from measurements: tables, a plot and a summary.

python figures/fill.py runs/evals "the demo's checkpoints, --quick"  # record experiments, then fill
python figures/fill.py runs/evals "the demo's checkpoints" table8_five_shot  # of these, what belongs to one folder
python figures/fill.py  # fill again from the records, and draw
python figures/fill.py --check  # exit 1 if a README or a plot differs from the record
"""

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from archive import cells_of, without_places
from folder_plots import Numbers, ablation_chart, folder_chart, scaling_chart, throughput_chart
from paper import ABLATED, FOLDERS, TABLE_6, Folder
from plots import RATES
from pretrained import panels
from scaling import SIDES, matched, records, scaling_runs
from tables import in_short, interval, side_by_side

from diff_transformer.evals.types import Result
from diff_transformer.lab.measures import Row, paired_rows
from diff_transformer.lab.record import Cells, load_all
from diff_transformer.lab.sides import CONTROL, name_of
from diff_transformer.report.generated import filled, keep
from diff_transformer.report.render import Chart

FIGURES = Path(__file__).resolve().parent
ABOUT = ("length", "samples", "seed", "steps", "dtype", "cpu", "threads", "commit", "date")
PRETRAINED = "pretrained.json"  # of a folder: the record of pretrained.py
MAIN = "novels"  # the desk study's setting with the most seeds
THROUGHPUT = FIGURES.parent / "benchmarks" / "results" / "throughput_cpu.json"
TABLE_7 = "table7_throughput"  # drawn from benchmarks; its table is one of benchmarks/speed_tables.py


def record(folder: Path, on: str, names: list[str]) -> None:
    """Keep, for each of the folders ``names``, the metrics and the provenance of every model; no examples."""
    for name, of in FOLDERS.items():
        if name not in names:
            continue
        results = {path.stem: Result.load(path) for path in sorted((folder / of.experiment).glob("*.json"))}
        if any(shown(of, result.metrics) for result in results.values()):
            kept = [
                {"eval": one.eval, "model": label, "metrics": one.metrics, "provenance": one.provenance}
                for label, one in results.items()
            ]
            text = json.dumps({"on": on, "results": without_places(kept)}, indent=1)
            (FIGURES / name / "measured.json").write_text(text + "\n")


def shown(of: Folder, metrics: dict[str, float]) -> dict[str, float]:
    return {key: value for key, value in metrics.items() if re.fullmatch(of.shown, key)}


def of_checkpoints(name: str) -> str:
    """The table of a folder's ``measured.json``: one pair, as an example of what the command gives."""
    path = FIGURES / name / "measured.json"
    if not path.exists():
        return ""
    kept = json.loads(path.read_text())
    which = _of_which_training(kept["results"][0]["provenance"])
    return "\n\n".join([f"On {kept['on']}{which}; one seed:", table_of(name, kept)])


def of_pretrained(name: str) -> str:
    """What a folder's ``pretrained.json`` holds: its picture, its command and its table."""
    path = FIGURES / name / PRETRAINED
    if not path.exists():
        return ""
    kept = json.loads(path.read_text())
    return "\n\n".join(
        [
            f"**On {kept['on']} as it is**, one model; {_minutes(kept)}:",
            f"    {kept['command']}",
            f"![{name.replace('_', ' ')} of {kept['on']}](pretrained.svg)",
            table_of(name, kept),
        ]
    )


def _minutes(kept: dict) -> str:
    minutes, threads = max(1, round(kept["seconds"] / 60)), kept["results"][0]["provenance"]["threads"]
    return f"{minutes} minute{'s' * (minutes > 1)}, {threads} thread{'s' * (threads > 1)}"


def pretrained_chart(name: str) -> Chart:
    kept = json.loads((FIGURES / name / PRETRAINED).read_text())
    numbers = {key: [value] for result in kept["results"] for key, value in result["metrics"].items()}
    return folder_chart(panels(name), {"softmax": numbers}, {})


def gallery(names: list[str]) -> str:
    """The page of the documentation that has every picture of a pretrained model, with its command."""
    parts, models = [], []
    for name in names:
        kept = json.loads((FIGURES / name / PRETRAINED).read_text())
        models.append(kept["on"])
        title = (FIGURES / name / "README.md").read_text().partition("\n")[0].removeprefix("# ")
        parts += [
            f"## {title}",
            f"![{name.replace('_', ' ')} of {kept['on']}](../figures/{name}/pretrained.svg)",
            f"    {kept['command']}",
            f"[All numbers, and those of small pairs](../figures/{name}/README.md). {_minutes(kept).capitalize()}.",
        ]
    about = (
        f"The paper's experiments on {' and '.join(dict.fromkeys(models))}, as it is: what each looks like on a "
        "pretrained Transformer. Samples are small; nothing is compared here. The times are of a machine that had "
        "other work. The commands ran at commit 0ae240a; MODEL is the model's folder and DATA has the public sets. "
        "Archives are unpacked first now."
    )
    return "\n\n".join(["# Gallery", about, *parts]) + "\n"


def table_of(name: str, kept: dict) -> str:
    """The numbers of the models of a record, and how they were measured."""
    columns = {result["model"]: shown(FOLDERS[name], result["metrics"]) for result in kept["results"]}
    keys = dict.fromkeys(key for metrics in columns.values() for key in metrics)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for key in keys:
        cells = (f"{metrics[key]:.4g}" if key in metrics else "" for metrics in columns.values())
        lines.append(f"| `{key}` | {' | '.join(cells)} |")
    source = kept["results"][0]["provenance"]
    if source.get("lengths"):
        source = {**source, "length": " ".join(map(str, source["lengths"]))}
    about = ", ".join(f"{key} {source[key]}" for key in ABOUT if source.get(key) is not None)
    return "\n".join([*lines, "", f"{about[0].upper()}{about[1:]}."])


def _of_which_training(source: dict) -> str:
    """True if these checkpoints are those of the demo's record: rounding differs between processors, so weights do."""
    demo = json.loads((FIGURES / "demo" / "results.json").read_text())["provenance"]
    same = source["commit"] == demo["commit"] and source["cpu"] == demo["cpu"]
    return "" if same else ", from another training run than [the demo's record](../demo/README.md)"


def of_desk(name: str, cells: Cells) -> str:
    """What the desk study says of a folder, over its seeds."""
    if name == "table6_ablation":
        return _ablation(cells)
    found = {column: paired_rows(cells, MAIN, side, FOLDERS[name].measures) for side, column in RATES.items()}
    found = {column: rows for column, rows in found.items() if rows}
    if not found:
        return ""
    measures = [row.measure for row in next(iter(found.values()))]
    control = [
        replace(row, verdict="") for row in paired_rows(*_among(cells, CONTROL), CONTROL, FOLDERS[name].measures)
    ]
    if [row.measure for row in control] == measures:  # the claims are DIFF's: the control has no verdict
        found[name_of(CONTROL)] = [replace(row, verdict="") for row in control]
    title = "[The desk study](../desk/README.md): novels and needles"
    short = [f"- {column}: {said}" for column, rows in found.items() if (said := in_short(rows))]
    pairs = next(iter(found.values()))[0].seeds
    about = f"**{title}**, {pairs} pairs, 95 % CIs; ✓: as the paper says, ✗: the opposite:"
    parts = ["\n".join(short), about, side_by_side(found)]
    if name == "figure3_scaling":
        parts += matched(cells)
    return "\n\n".join(part for part in parts if part)


def _ablation(cells: Cells) -> str:
    found = ablation_rows(cells)
    if not found:
        return ""
    lines = [
        "| | seeds | " + " | ".join(f"{measure.name}: difference from the Transformer" for measure in TABLE_6) + " |"
    ]
    lines.append("|---" * (len(TABLE_6) + 2) + "|")
    for side, rows in found.items():
        lines.append(f"| {ABLATED[side][0]} | {rows[0].seeds} | {' | '.join(map(interval, rows))} |")
    return "\n".join(
        [
            "[The desk study](../desk/README.md), one learning rate, paired differences with 95 % CIs:",
            "",
            *lines,
        ]
    )


def ablation_rows(cells: Cells) -> dict[str, list[Row]]:
    rows = {side: paired_rows(*_among(cells, side), side, TABLE_6) for side in ABLATED}
    return {side: found for side, found in rows.items() if found}


def _among(cells: Cells, side: str) -> tuple[Cells, str]:
    """The ablations were trained in the setting of the main comparison and have its Transformer as their baseline."""
    baseline = cells.get(MAIN, {}).get("softmax", {})
    if side == "softmax_wide":
        found = cells.get("maps4", {}).get("softmax", {})
    else:
        found = cells.get(MAIN, {}).get(side) or cells.get("ablation", {}).get(side, {})
    return {"table6": {"softmax": baseline, side: found}}, "table6"


def numbers(name: str, cells: Cells) -> Numbers:
    """The numbers of a folder's plot: of every seed of the desk study, where that has them, else of the record."""
    experiment = FOLDERS[name].experiment
    main = cells.get(MAIN, {})
    ours: Numbers = {}
    for side in ("softmax", *RATES, CONTROL):
        for record_of in (main.get(side) or cells.get("ablation", {}).get(side, {})).values():
            for key, value in record_of.metrics.get(experiment, {}).items():
                ours.setdefault(side, {}).setdefault(key, []).append(value)
    ticks = [p.ticks for p in FOLDERS[name].panels if not p.paper]
    wanted = {key for tick in ticks if isinstance(tick, dict) for key in tick.values()}
    if any(wanted & of.keys() or (not wanted and of) for of in ours.values()):
        return ours
    path = FIGURES / name / "measured.json"
    if not path.exists():
        return {}
    return {
        record.side: {key: [value] for key, value in record.metrics[experiment].items()} for record in load_all(path)
    }


def chart(name: str, cells: Cells) -> Chart:
    """The plot of a folder."""
    expected = json.loads((FIGURES / name / "expected.json").read_text())
    if name == TABLE_7:
        return throughput_chart(THROUGHPUT, expected)
    if name == "figure3_scaling":
        return scaling_chart(scaling_runs(cells), {side: records(cells, MAIN, side) for side in SIDES})
    if name == "table6_ablation":
        return ablation_chart(ablation_rows(cells), expected)
    return folder_chart(FOLDERS[name].panels, numbers(name, cells), expected)


def drawable(name: str, cells: Cells) -> bool:
    if name == TABLE_7:
        return True
    if name in ("figure3_scaling", "table6_ablation"):
        return MAIN in cells
    return bool(numbers(name, cells)) or any(panel.paper for panel in FOLDERS[name].panels)


def measured(name: str, cells: Cells) -> str:
    """What stands between the markers of a folder's README."""
    plot = [f"![{name.replace('_', ' ')}: ours, and the paper's where printed](plot.svg)"] * drawable(name, cells)
    parts = [part for part in (of_desk(name, cells), of_checkpoints(name), of_pretrained(name)) if part]
    return "\n\n".join([*plot, *(parts or ["Not run at this scale yet."])])


def status(name: str, cells: Cells) -> str:
    """What there is of ours, for the index."""
    if name == TABLE_7:
        return "on a CPU"
    if name == "table6_ablation":
        seeds = {row.seeds for rows in ablation_rows(cells).values() for row in rows}
    else:
        sides = [side for side in RATES if side in cells.get(MAIN, {})]
        seeds = {row.seeds for side in sides for row in paired_rows(cells, MAIN, side, FOLDERS[name].measures)}
    if seeds:
        return f"{' or '.join(map(str, sorted(seeds)))} pairs"
    return "one pair" if (FIGURES / name / "measured.json").exists() else "not run yet"


def index(cells: Cells) -> str:
    """The index of the folders, its last column filled."""
    row = re.compile(r"^(\| \[(\w+)\]\(\w+/README\.md\) \|.*\|.*\|)[^|\n]*\|$", re.M)
    return row.sub(lambda found: f"{found[1]} {status(found[2], cells)} |", (FIGURES / "README.md").read_text())


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] != "--check":
        record(Path(arguments[0]), arguments[1], arguments[2:] or list(FOLDERS))
    cells = cells_of(FIGURES / "desk")
    pages = {FIGURES / name / "README.md": {"measured": measured(name, cells)} for name in FOLDERS}
    made: dict[Path, str | Chart] = {page: filled(page, parts) for page, parts in pages.items()}
    made[FIGURES / "README.md"] = index(cells)
    made |= {FIGURES / name / "plot.svg": chart(name, cells) for name in (*FOLDERS, TABLE_7) if drawable(name, cells)}
    real = [name for name in FOLDERS if (FIGURES / name / PRETRAINED).exists()]
    made |= {FIGURES / name / "pretrained.svg": pretrained_chart(name) for name in real}
    made[FIGURES.parent / "docs" / "gallery.md"] = gallery(real)
    return keep(made, check=arguments == ["--check"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
