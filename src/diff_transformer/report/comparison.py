"""A comparison: the records of its models and what is said of them, from its folder; and ``results.json`` for people.

The page reads the records. ``results.json`` is an export: settings, verdicts, metrics and curves, without the rows of
examples, which each model's ``record.json`` has. Where a folder has no records of this version, as that of an earlier
one, ``results.json`` is read instead (``load.load_results``).
"""

from dataclasses import replace
from pathlib import Path

from diff_transformer.checks import read_json
from diff_transformer.lab.claims import judge, paper_claims
from diff_transformer.lab.record import Record, comparison_records
from diff_transformer.lab.sides import PAIR, name_of
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.cost import model_cost
from diff_transformer.report.load import load_results
from diff_transformer.report.models import OF_TRAINING, Results, of_comparison
from diff_transformer.train.config import RunConfig
from diff_transformer.train.data_config import DataConfig

REQUEST = "compare.json"  # of the folder: seeds and configuration; once it is finished, also what ``FACTS`` names
FACTS = ("command", "created", "seconds", "provenance")
NEAR = 0.02  # how far the counted parameters may lie from the model's for its other computed numbers to stand
_CURVES = ("step", "loss", "grad_norm", "tokens_per_second")


def load_comparison(path: Path | str) -> Results:
    """The comparison in a folder of ``compare``, or in its ``results.json``.

    Raises:
        ResultsError: when there is none.
    """
    folder = Path(path) if Path(path).is_dir() else Path(path).parent
    request = read_json(folder / REQUEST) if (folder / REQUEST).exists() else {}
    if set(FACTS) <= request.keys() and Path(path).name in (folder.name, "results.json"):
        return comparison(comparison_records(folder), request)
    return of_comparison(load_results(path))


def comparison(records: list[Record], request: dict) -> Results:
    """The content of a page about the ``records`` of a comparison, one a model.

    Args:
        request: the content of ``compare.json``, with ``FACTS``.
    """
    config = RunConfig.from_dict(request["config"])
    records = [_with_cost(record, config.data.length) for record in records]
    first, claims = {record.side: record for record in reversed(records)}, paper_claims(config.evaluation.needles)
    total = sum(config.data.mixture.values())
    about = {
        "title": "DIFF Transformer against its matched Transformer",
        "recipe": config.name,
        **{fact: request[fact] for fact in FACTS},
        "pair": {side: _model(first[side], config.data.length) for side in PAIR},
        "train": {
            "steps": config.train.steps,
            "batch_size": config.train.batch_size,
            "sequence_length": config.data.length,
            "tokens": config.train.steps * config.train.batch_size * config.data.length,
            "seeds": [config.train.seed + k for k in range(request["seeds"])],
            "corpus": corpus_label(config.data),
            "mixture": {name: share / total for name, share in config.data.mixture.items()},
            "lr": config.optim.lr,
            "config": config.to_dict(),
        },
        "claims": judge(claims, records),
    }
    if source := request.get("source"):
        about |= {"title": f"{source}, made differential and trained further", "source": source}
        about["claims_of"] = {"diff_v2": judge(claims, _as_the_pair(records, "diff_v2"))}
    return Results(records, about)


def _as_the_pair(records: list[Record], side: str) -> list[Record]:
    """The records with ``side`` in the place of "diff"."""
    return [replace(one, side="diff" if one.side == side else one.side) for one in records if one.side != "diff"]


def export(results: Results) -> dict:
    """The content of ``results.json`` (schema 1): no rows and no attention maps."""
    pair = [record for record in results.records if record.side in PAIR]
    others = [side for side in results.sides() if side not in PAIR]
    return {
        "schema": 1,
        **results.about,
        "curves": [_curve(record) for record in pair],
        "evals": [entry for record in pair for entry in _evals(record)],
        **({"variants": [_row(results, side) for side in (*PAIR, *others)]} if others else {}),
    }


def corpus_label(data: DataConfig) -> str:
    """The corpus as text: ``novels``, or for several corpora ``novels 70 %, code 30 %``."""
    if len(data.corpora) < 2:
        return Path(next(iter(data.corpora), data.corpus)).name
    total = sum(data.corpora.values())
    return ", ".join(f"{Path(name).name} {100 * weight / total:.3g} %" for name, weight in data.corpora.items())


def _with_cost(record: Record, length: int) -> Record:
    """The record with what ``quantities`` calls computed: parameters, FLOPs and cache of its configuration."""
    made = DiffTransformerConfig(**record.config["model"])
    cost = model_cost(made, length=length)
    computed = {
        "parameters": cost.total_parameters,
        "flops_per_token": cost.flops_per_token,
        "kv_bytes_per_token": cost.kv_bytes_per_token,
        "intermediate_size": made.intermediate_size,
    }
    measured = record.metrics.get("model", {})
    if (
        abs(measured.get("parameters", cost.total_parameters) / cost.total_parameters - 1) > NEAR
    ):  # experts, for example
        del computed["flops_per_token"]
    record.metrics["model"] = {**computed, **measured}
    return record


def _model(record: Record, length: int) -> dict:
    made = DiffTransformerConfig(**record.config["model"])
    return {
        "parameters": record.metrics["model"]["parameters"],
        "parameters_by_part": model_cost(made, length=length).parameters,
        "flops_per_token": record.metrics["model"].get("flops_per_token"),
        "config": made.to_diff_dict(),
    }


def _evals(record: Record) -> list[dict]:
    return [
        {
            "eval": name,
            "model": f"{record.side}-seed{record.seed}",
            "metrics": metrics,
            "rows": [],
            "provenance": record.provenance.get(name, {}),
            "attention": record.side,
            "seed": record.seed,
            **({"curves": {name: record.curves[name]}} if name in record.curves else {}),
        }
        for name, metrics in record.metrics.items()
        if name not in OF_TRAINING
    ]


def _curve(record: Record) -> dict:
    training, validation = record.curves["training"], record.curves["validation"]
    curve = {"attention": record.side, "seed": record.seed, **{name: training[name] for name in _CURVES}}
    curve |= {f"validation_{name}": values for name, values in validation.items()}
    lambdas = record.curves.get("lambda")
    if record.side == "diff" and lambdas:
        curve |= {"lambda": lambdas["layers"], "lambda_init": lambdas["init"]}
    return curve


def _row(results: Results, side: str) -> dict:
    """One row of the table of variants: cost and, by seed, loss, needles and recall."""
    records = {str(record.seed): record for record in results.records if record.side == side}
    first = next(iter(records.values()))
    cells = [f"n{n}_r{r}" for n, r in results.about["train"]["config"]["evaluation"]["needles"]]

    def by_seed(experiment: str, key: str) -> dict:
        return {seed: of[key] for seed, one in records.items() if key in (of := one.metrics.get(experiment, {}))}

    return {
        "variant": side,
        "label": name_of(side),
        "config": DiffTransformerConfig(**first.config["model"]).to_diff_dict(),
        **first.metrics["model"],
        "loss": by_seed("associative_recall", "validation"),
        "needles": {cell: found for cell in cells if (found := by_seed("needle", cell))},
        "recall": {
            seed: {"metrics": one.metrics["recall"], "curve": one.curves.get("recall", {})}
            for seed, one in records.items()
            if "recall" in one.metrics
        },
        **first.metrics.get("throughput", {}),
    }
