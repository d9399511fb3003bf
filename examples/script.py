"""From Python what the commands do: train a small matched pair, measure a model, convert it, read the records.

python examples/script.py runs/script    # a minute on two CPU cores
"""

import sys
from pathlib import Path

from diff_transformer import compare, convert_folder, load_records, run_eval


def main(out: Path) -> None:
    """Write ``pair/``, ``converted/`` and ``allocation.jsonl.gz`` to the folder ``out``."""
    compare("debug", out / "pair", settings={"train.steps": 20}, report=False)  # report=True writes the page
    for record in load_records(out / "pair"):
        print(f"{record.side}: validation loss {record.metrics['validation_loss']:.3f} nats a token")

    source = out / "pair" / "members" / "softmax-seed0" / "run" / "model"
    for note in convert_folder(source, out / "converted", target="diff_v2"):  # the same outputs, two maps
        print(note)
    record = run_eval("allocation", out / "converted", {"samples": 2}, out / "allocation.jsonl.gz", quick=True)
    print(record.metrics["answer"], "of the attention is on the answer")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/script"))
