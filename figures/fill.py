"""Put what experiments measured into the folders of the paper's tables and figures.

python figures/fill.py runs/evals "the demo's checkpoints, --quick"  # record and fill
python figures/fill.py  # fill again from the records
python figures/fill.py --check  # exit 1 if one differs
"""

import json
import re
import sys
from pathlib import Path

from record import without_places

FIGURES = Path(__file__).resolve().parent
MEASURED = re.compile(r"(?<=<!-- measured -->\n).*?(?=\n<!-- /measured -->)", re.DOTALL)

# The folder of each table and figure: its experiment, and which of the metrics belong to it (None: all that are few).
SHOWN: dict[str, tuple[str, str | None]] = {
    "table1_harness": ("harness", r"(.+_0shot|mean_0shot)(?<!_acc)(?<!_acc_norm)(?<!_truncated)"),
    "table8_five_shot": ("harness", r"(.+_5shot|mean_5shot)(?<!_acc)(?<!_acc_norm)(?<!_truncated)"),
    "figure3_scaling": ("scaling", r".*ratio.*"),
    "figure4_long_nll": ("long_nll", r"nll\d+"),
    "table2_needle": ("needle", r"n\d+_r\d+|n\d+_r\d+_depth\d+|chance"),
    "figure5_needle_64k": ("needle", r"n\d+_r\d+_len\d+.*"),
    "table3_allocation": ("allocation", r"(answer|noise)(_depth\d+)?"),
    "figure6_many_shot": ("many_shot", r"shots\d+|tokens\d+|chance"),
    "figure7_order": ("many_shot", r"(random|alternate)_(mean|best|worst|margin)|chance"),
    "figure9_order": ("many_shot", r"(random|alternate)_(mean|margin)|chance"),
    "table4_hallucination": ("hallucination", r"(?!.*_(stderr|undecided|empty|truncated)$).+"),
    "table5_outliers": ("outliers", r"(logits|hidden)_(top\d+|median)"),
    "figure8_quantization": ("quantization", r"(accuracy|loss)_\d+bit|chance"),
    "table6_associative_recall": ("associative_recall", r"validation|ar_hit|others|ar_hit_share"),
    "table6_ablation": ("ablation", r".+_(validation|ar_hit|others)"),
    "appendix_f_gradient_flow": ("gradient_flow", r"(model|init_diff|init_softmax)_(q1|q2|k1|k2|q|k|v|o)|error_w_.*"),
}
ABOUT = ("length", "samples", "seed", "steps", "dtype", "cpu", "threads", "commit", "date")


def record(folder: Path, on: str) -> None:
    """Keep, for each folder, the metrics and the provenance of every model; no examples."""
    for name, (experiment, _) in SHOWN.items():
        results = [json.loads(path.read_text()) for path in sorted((folder / experiment).glob("*.json"))]
        if results and any(_metrics(name, result) for result in results):
            kept = [{key: result[key] for key in ("eval", "model", "metrics", "provenance")} for result in results]
            text = json.dumps({"on": on, "results": without_places(kept)}, indent=1)
            (FIGURES / name / "measured.json").write_text(text + "\n")


def _metrics(name: str, result: dict) -> dict[str, float]:
    wanted = SHOWN[name][1]
    return {key: value for key, value in result["metrics"].items() if wanted is None or re.fullmatch(wanted, key)}


def measured(name: str) -> str:
    """What stands between the markers of a folder's README: a table from its ``measured.json``."""
    path = FIGURES / name / "measured.json"
    if not path.exists():
        return "Not run at this scale yet."
    kept = json.loads(path.read_text())
    columns = {result["model"]: _metrics(name, result) for result in kept["results"]}
    keys = dict.fromkeys(key for metrics in columns.values() for key in metrics)
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for key in keys:
        cells = (f"{metrics[key]:.4g}" if key in metrics else "" for metrics in columns.values())
        lines.append(f"| `{key}` | {' | '.join(cells)} |")
    source = kept["results"][0]["provenance"]
    about = ", ".join(f"{key} {source[key]}" for key in ABOUT if source.get(key) is not None)
    return "\n".join([f"On {kept['on']}; one seed:", "", *lines, "", f"{about[0].upper()}{about[1:]}."])


def filled(name: str) -> str:
    text = (FIGURES / name / "README.md").read_text()
    return MEASURED.sub(lambda _: measured(name), text)


def main(arguments: list[str]) -> int:
    if arguments and arguments[0] != "--check":
        record(Path(arguments[0]), arguments[1])
    stale = [name for name in SHOWN if (FIGURES / name / "README.md").read_text() != filled(name)]
    if arguments == ["--check"]:
        print("\n".join(f"figures/{name}/README.md differs from its measured.json" for name in stale))
        return bool(stale)
    for name in stale:
        (FIGURES / name / "README.md").write_text(filled(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
