"""Rows of what an experiment or a training run returned (``lab/record.py`` describes them)."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial

from diff_transformer.evals.types import Result
from diff_transformer.lab.rows import KEYS, row

_NAMES = {"needle": {"needles": "n", "queries": "r"}}  # columns that rows call otherwise
_FOUND = {  # numbers that no function of the rows gives
    "needle": ("chance",),
    "allocation": ("answer_mean_map", "noise_mean_map", "best_head_answer"),
    "associative_recall": ("ar_hit_share",),
    "recall": ("chance", "answer", "noise", "answer_mean_map", "noise_mean_map", "best_head_answer", "first_question"),
    "many_shot": ("chance", "labels", "ties"),
    "quantization": ("chance", "truncated"),
    "long_nll": ("books",),
}


def rows_of(result: Result, side: str, seed: int = 0, setting: str = "") -> Iterator[dict]:
    """The rows of one measurement of one model.

    Args:
        side, seed, setting: of the model, as in ``lab.record.Record``. ``seed`` is the training seed; the data seed is
            that of the result's provenance.
    """
    about, name = result.provenance, result.eval
    given = about.get("seed")
    data_seed = given if isinstance(given, int) else 0
    make = partial(row, side=side, seed=seed, setting=setting, data_seed=data_seed)
    examples = _EXAMPLES.get(name, _plain)(name, result.rows, make, about)
    yield from examples
    for key, value in result.metrics.items():
        if key in _FOUND.get(name, ()) or name not in _EXAMPLES:
            yield make("metric", example=key, of=name, key=key, value=value)
    if name == "outliers":
        yield from _outliers(result.metrics, make)
    for key in ("path", "weights", "attention", "dtype"):
        if about.get(key):
            yield make("about", example=key, of="model", key=key, value=about[key])
    for key, value in about.items():
        yield make("about", example=key, of=name, key=key, value=value)


def _plain(name: str, rows: Iterable[dict], make, about) -> Iterator[dict]:
    other = _NAMES.get(name, {})
    for place, values in enumerate(rows):
        example = values.get("row", values.get("id", place))
        if "set" in values:  # ids are unique in their set
            example = f"{values['set']} {example}"
        columns = {other.get(key, key): value for key, value in values.items() if key != "row"}
        yield make(name, example=example, **{f"{key}_" if key in KEYS else key: of for key, of in columns.items()})


def _allocation(name: str, rows: Iterable[dict], make, about) -> Iterator[dict]:
    lists = ("answer_layers", "answer_heads", "noise_layers", "noise_heads")
    for place, values in enumerate(rows):
        yield make(name, example=place, **{key: value for key, value in values.items() if key not in lists})
        for layer, of in enumerate(zip(values["answer_heads"], values["noise_heads"], strict=True)):
            for head, (answer, noise) in enumerate(zip(*of, strict=True)):
                yield make("allocation_heads", example=place, layer=layer, head=head, answer=answer, noise=noise)


def _quantization(name: str, rows: Iterable[dict], make, about) -> Iterator[dict]:
    """Losses of rows of text, and right choices; each counted for each number of bits."""
    places: dict[tuple, int] = {}
    for values in rows:
        text = "loss" in values
        place = places[text, values["bits"]] = places.get((text, values["bits"]), -1) + 1
        columns = {key: value for key, value in values.items() if key not in ("row", "logprobs")}
        yield make(name if text else "quantization_choice", example=values.get("row", place), **columns)


def _long_nll(name: str, rows: Iterable[dict], make, about) -> Iterator[dict]:
    for values in rows:
        if "sums" not in values:  # a study's record of one length
            yield make(name, example=values["book"], end=values.get("length", 0), sum=values["loss"], count=1)
            continue
        for end, total, count in zip(about["edges"][1:], values["sums"], values["counts"], strict=False):
            yield make(name, example=values["book"], end=end, sum=total, count=count)


def _recall(name: str, rows: Iterable[dict], make, about) -> Iterator[dict]:
    for values in rows:
        for place, hits in enumerate(values["hits"]):
            yield make(name, example=place, length=values["length"], hits=hits, questions=values["questions"])


def _many_shot(name: str, rows: Iterable[dict], make, about) -> Iterator[dict]:
    places: dict[tuple, int] = {}
    for values in rows:
        key = values["shots"], values["order"], values["order_seed"]
        places[key] = places.get(key, -1) + 1
        columns = {key: value for key, value in values.items() if key != "logprobs"}
        yield make(name, example=places[key], **columns)


def _gradient_flow(name: str, rows: Iterable[dict], make, about) -> Iterator[dict]:
    for values in rows:
        for of, rms in values["rms"].items():
            part, _, layer = of.rpartition("_layer")
            place = f"{values['state']} {values['batch']}"
            yield make(
                name, example=place, state=values["state"], part=part or of, layer=int(layer) if part else -1, rms=rms
            )


def _outliers(metrics: Mapping[str, float], make) -> Iterator[dict]:
    """The largest values of each kind and layer; both maps of DIFF together."""
    for key, value in metrics.items():
        kind, *layer, last = ["", *key.split("_")][-3 if "layer" in key else -2 :]
        if kind in ("logits", "hidden"):
            k, layer = 0 if last == "median" else int(last.removeprefix("top")), int(layer[0][5:]) if layer else -1
            yield make("outliers_top", example=key, kind=kind, layer=layer, k=k, value=value)


_EXAMPLES = {
    "needle": _plain, "allocation": _allocation, "associative_recall": _plain, "outliers": _plain,
    "quantization": _quantization, "long_nll": _long_nll, "recall": _recall, "many_shot": _many_shot,
    "hallucination": _plain, "throughput": _plain, "gradient_flow": _gradient_flow,
}  # fmt: skip


def rows_of_curves(curves: Mapping[str, Mapping], side: str, seed: int = 0, setting: str = "") -> Iterator[dict]:
    """The rows of a run's curves, as ``lab.worker.training_curves`` has them."""
    make = partial(row, side=side, seed=seed, setting=setting)
    for name, curve in curves.items():
        steps = curve.get("step", curves.get("validation", {}).get("step", []))
        if name == "lambda":
            for step, layers in zip(steps, curve["layers"], strict=True):
                for layer, value in enumerate(layers):
                    init = curve["init"][layer] if curve["init"] else None
                    yield make("lambda", example=step, step=step, layer=layer, value=value, init=init)
        elif name == "sources":
            for source, losses in curve.items():
                for step, loss in zip(steps, losses, strict=False):
                    if loss is not None:
                        yield make("sources", example=step, step=step, source=source, loss=loss)
        else:
            experiment = f"{name}_curve" if name in ("recall", "needles") else name
            columns = {key: values for key, values in curve.items() if key != "step"}
            for place, step in enumerate(steps):
                yield make(
                    experiment, example=step, step=step, **{key: values[place] for key, values in columns.items()}
                )
