"""Run the paper's experiments on a pretrained model as it is: a picture of each on a model that can do the task.

python figures/pretrained.py MODEL NAME DATA OUT                 # all; the time of each stands on its page
python figures/pretrained.py MODEL NAME DATA OUT table2_needle   # one folder
python figures/fill.py                                           # then: tables, pictures and docs/gallery.md

NAME is what pages call the model. DATA has the public sets as they are published: books/val.tar.xz, trec/, arc/,
hellaswag/, hotpotqa/. The measurements go to OUT, where an interrupted call continues (its time is that of the last
part); the numbers to FOLDER/pretrained.json.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from archive import without_places
from paper import DEPTHS, FOLDERS, Panel, margins

from diff_transformer.lab.record import load_all

FIGURES = Path(__file__).resolve().parent
_BOOKS = "--corpus {data}/books/val.tar.xz"
_SHOTS = "many_shot --data {data}/trec --samples 40 --set lengths=[256,512,1024,2048] --set order_seeds=5"
RUNS = {  # folder -> experiment and its options
    "table2_needle": f"needle {_BOOKS} --chat-template --length 1024 --samples 20",
    "table3_allocation": f"allocation {_BOOKS} --length 1024 --samples 10",
    "figure6_many_shot": _SHOTS,
    "figure7_order": _SHOTS,
    "table4_hallucination": "hallucination --data {data}/hotpotqa --chat-template --samples 40",
    "table1_harness": "harness --data {data}/arc --samples 200",
    "table8_five_shot": "harness --data {data}/arc --samples 100 --set shots=5",
    "table5_outliers": f"outliers {_BOOKS} --length 1024 --samples 40",
    "figure8_quantization": f"quantization {_BOOKS} --data {{data}}/hellaswag/hellaswag_val_full.txt.bz2 --samples 100"
    " --set rows=8",
    "figure4_long_nll": f"long_nll {_BOOKS} --length 4096 --samples 20",
}
# The picture of a folder where its panels for small models do not fit.
_SHARE = "share right"
PANELS = {
    "table2_needle": (
        Panel("by number of needles", {f"{r} of {n}": f"n{n}_r{r}" for n, r in ((1, 1), (2, 2), (4, 2), (6, 2))},
              "share found", level="chance"),
        Panel("2 of 6 by depth", {f"{d} %": f"n6_r2_depth{d}" for d in DEPTHS}, "share found", line=True,
              level="chance"),
    ),
    "table1_harness": (Panel("zero-shot", {"ARC-E": "ARC-Easy_0shot", "ARC-C": "ARC-Challenge_0shot"}, _SHARE),),
    "table8_five_shot": (Panel("five-shot", {"ARC-E": "ARC-Easy_5shot", "ARC-C": "ARC-Challenge_5shot"}, _SHARE),),
    "table4_hallucination": (
        Panel("judged by containment",
              {"Hotpot": "hotpotqa.gold_with_3_distractors", "2Wiki": "2wikimultihopqa.gold_with_3_distractors",
               "Hotpot,\nall": "hotpotqa_train"}, "share free of it"),
    ),
    "figure4_long_nll": (
        Panel("mean over the first tokens of a book", {str(2**i): f"nll{2**i}" for i in range(5, 13)}, "nats a token",
              line=True),
    ),
    "figure7_order": margins("TREC"),
}  # fmt: skip


def panels(name: str) -> tuple[Panel, ...]:
    """What the picture of a folder shows of a pretrained model."""
    chosen = PANELS.get(name) or [panel for panel in FOLDERS[name].panels if not panel.paper]
    return tuple(replace(panel, title=panel.title.removeprefix("ours: ")) for panel in chosen)


def main(model: str, called: str, data: str, out: str, *names: str) -> None:
    for name in names or RUNS:
        options = RUNS[name]
        path = Path(out) / f"{list(RUNS.values()).index(options)}-{options.split()[0]}.json"
        start = time.monotonic()
        if not path.exists():
            call = ["eval", *options.format(data=data).split(), "--model", model, "--dtype", "bfloat16", "--resume"]
            subprocess.run([sys.executable, "-m", "diff_transformer", *call, "--out", str(path)], check=True)
            path.with_suffix(".seconds").write_text(f"{time.monotonic() - start:.0f}")
        kept = {
            "on": called,
            "command": f"diff-transformer eval {options.format(data='DATA')} --model MODEL --dtype bfloat16 --out FILE",
            "seconds": int(path.with_suffix(".seconds").read_text()),
            "results": [
                {"eval": experiment, "model": called, "metrics": metrics,
                 "provenance": record.provenance.get(experiment, {})}
                for record in load_all(path) for experiment, metrics in record.metrics.items()
            ],
        }  # fmt: skip
        (FIGURES / name / "pretrained.json").write_text(json.dumps(without_places(kept), indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
