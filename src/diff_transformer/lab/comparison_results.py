"""The content of a comparison's ``results.json``: from the records of its runs, and from timing their models."""

import datetime
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diff_transformer.evals.provenance import provenance
from diff_transformer.lab.claims import judge, paper_claims
from diff_transformer.lab.record import PAIR, Record, load_all, of_result, save_all
from diff_transformer.lab.sides import name_of
from diff_transformer.lab.spec import EXPLORER, RECALL, side_model
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.cost import model_cost
from diff_transformer.train.config import RunConfig
from diff_transformer.train.data_config import DataConfig

_SPEEDS = ("train_tokens_per_second", "forward_tokens_per_second")
_NO_EVAL = ("gradients", "model")  # metrics of a record that no experiment measured


def throughput(config: RunConfig, out: Path, sides: Sequence[str]) -> list[Record]:
    """The speed of the trained models of the first seed, alone on the machine, with all threads.

    It is measured once and kept in ``out/throughput.json``. All models are timed together, so that any two can be
    compared: again if one of ``sides`` is new.
    """
    import torch

    from diff_transformer.bench.throughput import measure_throughput
    from diff_transformer.model.loading import read_model

    path = out / "throughput.json"
    known = load_all(path) if path.exists() else []
    if {record.side for record in known} >= set(sides):
        return known
    names = [f"{side}-seed0" for side in sides]
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {name: read_model(out / "members" / name / "run" / "model").to(device) for name in names}
    generator = torch.Generator().manual_seed(0)
    shape = (config.train.batch_size, config.data.length)
    ids = torch.randint(0, config.model["vocab_size"], shape, generator=generator).to(device)
    results = measure_throughput(
        models, ids, precision=config.train.precision, repeats=config.evaluation.throughput_repeats
    )
    torch.set_num_threads(threads)
    records = [of_result(result, setting=config.name) for result in results]
    save_all(records, path)
    return records


def variant_rows(config: RunConfig, sides: Sequence[str], records: Sequence[Record], speeds: Sequence[Record]) -> list:
    """One row per model: its cost and, by seed, the loss on held-out text, the needles found in each cell, and recall.

    Args:
        records: of all runs.
        speeds: throughput of the first seed's models, measured together.
    """
    rows = []
    for side in sides:
        made = DiffTransformerConfig(**side_model(config, side))
        cost = model_cost(made, length=config.data.length)
        of_side = [record for record in records if record.side == side]
        mine = [record for record in of_side if record.setting != RECALL]
        needles = [f"n{n}_r{r}" for n, r in config.evaluation.needles]
        found = {str(r.seed): r.metrics["needle"] for r in mine if "needle" in r.metrics}
        losses = {str(r.seed): r.metrics["associative_recall"] for r in mine if "associative_recall" in r.metrics}
        row: dict[str, Any] = {
            "variant": side,
            "label": name_of(side),
            "config": made.to_diff_dict(),
            "parameters": cost.total_parameters,
            "flops_per_token": cost.flops_per_token,
            "kv_bytes_per_token": cost.kv_bytes_per_token,
            "intermediate_size": made.intermediate_size,
            "loss": {seed: metrics["validation"] for seed, metrics in losses.items()},
            "needles": {cell: {seed: metrics[cell] for seed, metrics in found.items()} for cell in needles if found},
            "recall": {
                str(record.seed): {"metrics": record.metrics[RECALL], "curve": record.curves[RECALL]}
                for record in of_side
                if record.setting == RECALL
            },
        }
        for speed in speeds:
            if speed.side == side:
                row |= {way: speed.metrics["throughput"][way] for way in _SPEEDS}
        rows.append(row)
    return rows


def summary_of(config: RunConfig, measured: list[Record], seeds: int, seconds: float) -> dict:
    """The content of ``results.json``, without the table of variants."""
    records, pair = [record for record in measured if record.side in PAIR], {}
    trained = [record for record in records if record.curves and record.setting != RECALL]
    for side in PAIR:
        model = DiffTransformerConfig(**side_model(config, side))
        cost = model_cost(model, length=config.data.length)
        pair[side] = {
            "parameters": cost.total_parameters,
            "parameters_by_part": cost.parameters,
            "flops_per_token": cost.flops_per_token,
            "config": model.to_diff_dict(),
        }
    total = sum(config.data.mixture.values())
    return {
        "schema": 1,
        "title": "DIFF Transformer against its matched Transformer",
        "recipe": config.name,
        "command": shlex.join(["diff-transformer", *sys.argv[1:]]),
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": seconds,
        "provenance": provenance(),
        "pair": pair,
        "train": {
            "steps": config.train.steps,
            "batch_size": config.train.batch_size,
            "sequence_length": config.data.length,
            "tokens": config.train.steps * config.train.batch_size * config.data.length,
            "seeds": [config.train.seed + k for k in range(seeds)],
            "corpus": corpus_label(config.data),
            "mixture": {name: share / total for name, share in config.data.mixture.items()},
            "lr": config.optim.lr,
            "config": config.to_dict(),
        },
        "claims": judge(paper_claims(config.evaluation.needles), measured),
        "curves": [_curve(record) for record in trained],
        "evals": [entry for record in records for entry in _evals(record)],
        "explorer": [
            {**entry, "attention": record.side} for record in records for entry in record.rows.get(EXPLORER, ())
        ],
    }


def corpus_label(data: DataConfig) -> str:
    """The corpus as text: ``novels``, or for several corpora ``novels 70 %, code 30 %``."""
    if len(data.corpora) < 2:
        return Path(next(iter(data.corpora), data.corpus)).name
    total = sum(data.corpora.values())
    return ", ".join(f"{Path(name).name} {100 * weight / total:.3g} %" for name, weight in data.corpora.items())


def _evals(record: Record) -> list[dict]:
    """The experiments of a record, in the form of ``results.json``."""
    return [
        {
            "eval": name,
            "model": f"{record.side}-seed{record.seed}",
            "metrics": metrics,
            "rows": record.rows.get(name, []),
            "provenance": record.provenance.get(name, {}),
            "attention": record.side,
            "seed": record.seed,
            **({"curves": {name: record.curves[name]}} if name in record.curves else {}),
        }
        for name, metrics in record.metrics.items()
        if name not in _NO_EVAL
    ]


def _curve(record: Record) -> dict:
    """The curves of a record, in the form of ``results.json``."""
    validation = {f"validation_{name}": values for name, values in record.curves["validation"].items()}
    curve = {"attention": record.side, "seed": record.seed, **record.curves["training"], **validation}
    if record.side == "diff":
        lambdas = record.curves["lambda"]
        curve |= {"lambda": lambdas["layers"], "lambda_init": lambdas["init"]}
    return curve
