"""From a Transformer to DIFF Transformers: how far they are from it, what learns, and what training on gives.

python figures/uptraining/run.py runs/uptraining  # train what is not finished there, record it, draw
python figures/uptraining/run.py                  # README's tables and the plot again, from measured.json
python figures/uptraining/run.py --check          # exit 1 if README's tables differ from measured.json
"""

import dataclasses
import json
import resource
import sys
from pathlib import Path

import torch
from rich.progress import Progress

from diff_transformer.evals.provenance import provenance
from diff_transformer.lab.recipes import recipe
from diff_transformer.train.config import RunConfig
from diff_transformer.train.data_config import DataConfig
from diff_transformer.train.loop import train
from diff_transformer.train.metrics import read_metrics
from diff_transformer.train.training_data import load_training_data

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
from archive import without_places  # noqa: E402
from arms import ARMS, arm, distance, gradient_norms  # noqa: E402  (beside this file, like draw; archive is above)

SEEDS = (0, 1, 2)
ALL_SEEDS = ("source", "wider", "diff", "diff_v2")  # of ARMS; the rest has one
RATES, AT_RATES = (1e-3, 5e-4, 2e-3), ("source", "diff", "diff_v2")  # the first for all; the others for these, one seed
SOURCE_STEPS, MORE_STEPS, VALIDATE_EVERY = 1500, 400, 50


def source_config() -> RunConfig:
    """The demo's Transformer, on text alone."""
    config = recipe("demo")
    config.name = "uptraining-source"
    config.model = {**config.model, "attention": "softmax", "vocab_size": 1024, "head_norm_init": 1.0}
    config.data = DataConfig(max_bytes=8_000_000, length=128)
    config.optim = dataclasses.replace(config.optim, lr=2e-3)
    config.train = dataclasses.replace(
        config.train, steps=SOURCE_STEPS, batch_size=8, validate_every=500, validation_rows=128, checkpoint_every=500,
        threads=1,
    )  # fmt: skip
    return config


def more_config(start: Path, seed: int, rate: float = RATES[0]) -> RunConfig:
    """The same data in an order of its own, half the learning rate, another warm-up and decay: equal for every arm."""
    config = recipe("uptrain")
    config.name = f"uptraining-{start.name}-{seed}"
    config.data = dataclasses.replace(source_config().data, tokenizer=str(start))
    config.optim = dataclasses.replace(config.optim, lr=rate)
    config.train = dataclasses.replace(
        config.train, initial_model=str(start), steps=MORE_STEPS, seed=100 + seed, validate_every=VALIDATE_EVERY
    )
    return config


def trained(config: RunConfig, folder: Path, training_data=None):
    """Train unless it is done; an interrupted run goes on. Returns its metrics."""
    if not (folder / "model" / "config.json").exists():
        with Progress() as bar:
            task = bar.add_task(config.name, total=config.train.steps)
            show = lambda step, values: bar.update(task, completed=step)  # noqa: E731
            train(config, folder, resume=(folder / "config.json").exists(), data=training_data, progress=show)
    return read_metrics(folder / "metrics.jsonl")


def main(out: Path) -> None:
    from transformers import AutoModelForCausalLM

    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    config = source_config()
    training_data = load_training_data(config)
    trained(config, out / "source", training_data)
    source = AutoModelForCausalLM.from_pretrained(out / "source" / "model").eval()
    rows, calibration = training_data.validation[:16], torch.from_numpy(training_data.mixture.batch(0)["input_ids"])
    tokens = {"source": SOURCE_STEPS * 8 * 128, "more": MORE_STEPS * 8 * 128}
    about = provenance(dtype="float32", tokens=tokens, source=without_places(config.to_dict()))
    record = {"start": {}, "curves": {}, "provenance": about}
    for name in ARMS:
        model = arm(name, source, calibration).eval()
        if not (out / "arms" / name / "config.json").exists():
            model.save_pretrained(out / "arms" / name)
            training_data.tokenizer.save_pretrained(out / "arms" / name)
        record["start"][name] = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "fp32": distance(model, source, rows, torch.float32),
            "bf16": distance(model, source, rows, torch.bfloat16),
            "gradients": gradient_norms(model, rows),
        }
    for seeds, names in ((SEEDS, ALL_SEEDS), (SEEDS[:1], [name for name in ARMS if name not in ALL_SEEDS])):
        for seed in seeds:
            order = None
            for name in names:
                more = more_config(out / "arms" / name, seed)
                done = (out / "more" / f"{name}-{seed}" / "model" / "config.json").exists()
                order = order or (None if done else load_training_data(more))
                lines = trained(more, out / "more" / f"{name}-{seed}", order)
                record["curves"].setdefault(name, {})[str(seed)] = curve(lines)
                (HERE / "measured.json").write_text(json.dumps(record, indent=1) + "\n")
    order, record["rates"] = None, {}
    for rate in RATES[1:]:
        for name in AT_RATES:
            more = more_config(out / "arms" / name, SEEDS[0], rate)
            order = order or load_training_data(more)
            lines = trained(more, out / "rates" / f"{name}-{rate:g}", order)
            record["rates"].setdefault(f"{rate:g}", {})[name] = curve(lines)["loss"][-1]
            (HERE / "measured.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_utime / 60:.1f} minutes of processor time")


def curve(lines: list[dict]) -> dict[str, list]:
    """Validation loss by step, and lambda of every layer at the end."""
    checked = [line for line in lines if "validation_loss" in line]
    last = [line["lambda"] for line in lines if "lambda" in line]
    found = {
        "step": [line["step"] for line in checked],
        "loss": [round(line["validation_loss"], 5) for line in checked],
    }
    return found | ({"lambda": last[-1]} if last else {})


if __name__ == "__main__":
    from draw import draw

    check = sys.argv[1:] == ["--check"]
    if len(sys.argv) > 1 and not check:
        main(Path(sys.argv[1]))
    sys.exit(draw(check=check))
