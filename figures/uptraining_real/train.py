"""Train and measure the arms of the study, as preregistration.md says: a plan for ``compare --from``.

python figures/uptraining_real/train.py SMOLLM2 BOOKS runs/real --minutes 60    # repeat until all models are finished

SMOLLM2 is a folder of SmolLM2-135M-Instruct. BOOKS is a folder with train-a.tar.xz and val.tar.xz, archives of books in
plain text, no author of one in the other.
"""

import argparse
import tarfile
from pathlib import Path

from diff_transformer.lab.compare import compare
from diff_transformer.lab.recipes import recipe
from diff_transformer.train.config import EvaluationConfig, OptimConfig, RunConfig, TrainConfig
from diff_transformer.train.data_config import DataConfig, NeedleConfig

SETTING = "uptraining_real"
SEEDS = 6  # of the order of rows
CELLS = ((4, 2), (6, 2))  # the primary outcome's needles in a prompt, and needles asked for
TEXTS = {"train": ("train-a.tar.xz", 120), "val": ("val.tar.xz", 44)}  # archive, and books taken of it
SKIPPED, KEPT = 20_000, 100_000  # bytes of each book


def config(texts: Path) -> RunConfig:
    """What all arms share: rows, steps, rate, and what is measured."""
    made = recipe("uptrain")
    made.name = SETTING
    made.data = DataConfig(
        corpus=str(texts), length=512, mixture={"text": 0.4, "needles": 0.4, "pairs": 0.2}, loss="sources",
        needles=NeedleConfig(counts=(1, 2, 4, 6), queries=(1, 2)),
    )  # fmt: skip
    made.optim = OptimConfig(lr=3e-4, warmup_steps=5, weight_decay=0.0)
    made.train = TrainConfig(
        steps=24, batch_size=4, precision="bf16-mixed", weights="attention", loss_chunk=512, threads=1, log_every=4,
        validate_every=24, validation_rows=4, checkpoint_every=24, checkpoint_keep=1, checkpoint_best=False,
    )  # fmt: skip
    made.evaluation = EvaluationConfig(
        needles=CELLS, needle_lengths=(1024,), samples=4, allocation_needles=4, allocation_samples=2, loss_rows=24,
        outlier_rows=4, throughput_repeats=1,
    )  # fmt: skip
    return made


def write_texts(books: Path, out: Path) -> Path:
    """A corpus of parts of the books, with the split of the archives; it is written once."""
    for side, (archive, count) in TEXTS.items():
        folder = out / side
        if folder.exists() and len(list(folder.iterdir())) == count:
            continue
        folder.mkdir(parents=True, exist_ok=True)
        with tarfile.open(books / archive, "r|*") as members:
            files = (member for member in members if member.isfile())
            for number, member in zip(range(count), files, strict=False):
                content = members.extractfile(member)
                assert content is not None
                text = content.read()[SKIPPED : SKIPPED + KEPT].decode(errors="ignore")
                (folder / f"{number:03}.txt").write_text(text, encoding="utf-8")
    return out


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train and measure the arms of the study.")
    parser.add_argument("model", type=Path)
    parser.add_argument("books", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--minutes", type=float)
    given = parser.parse_args()
    texts = write_texts(given.books, given.out.with_name(f"{given.out.name}-texts").resolve())
    begun = (given.out / "compare.json").exists()
    compare(config(texts), given.out, source=given.model, seeds=SEEDS, resume=begun, minutes=given.minutes)
