"""Files of results that earlier versions wrote, as the fields of a ``Record``.

This is the only place that takes a setting, a side or a seed from a name. It knows no ``Record``: ``record.records_of``
makes records of what ``fields_of`` returns.
"""

import re
from pathlib import Path

from diff_transformer import checks
from diff_transformer.lab.sides import PAIR

Fields = dict  # of a Record: setting, side, seed, and some of config, metrics, rows, curves, provenance and diverged


def fields_of(value: dict, path: Path | None = None, root: Path | None = None) -> list[Fields] | None:
    """The fields of the records in a JSON value; several with one setting, side and seed are parts of one record.

    Args:
        value: the result of an experiment or ``{"results": [...]}`` of several, the ``results.json`` of a comparison
            (schema 1), the ``{"cells": ...}`` or ``{"curves": ...}`` of a recorded study, the ``result.json`` of a
            study's run, or the ``slices.json`` of an ablation's row.
        path: its file. In a study, the run's folder names the setting, side and seed.
        root: the folder given by the user; the setting is a path relative to it.

    Returns:
        None for a value of another form.
    """
    if {"eval", "model", "metrics"} <= value.keys():
        return [result_fields(value)]
    if isinstance(value.get("results"), list) and value.get("schema") != 1 and "cells" not in value:
        return [result_fields(one) for one in value["results"]]
    if value.get("schema") == 1 and ("evals" in value or "curves" in value):
        return _comparison(value)
    if isinstance(value.get("cells"), dict):
        return [
            _study_run(record, setting, side, int(seed))
            for setting, sides in value["cells"].items()
            for side, seeds in sides.items()
            for seed, record in seeds.items()
        ]
    if isinstance(value.get("curves"), dict) and "start" in value:
        return _uptraining(value)
    if {"validation", "tokens_per_step", "model"} <= value.keys() and path is not None:
        side, seed = split_name(path.parent.name)
        parent = path.parent.parent
        inside = root is not None and parent.is_relative_to(root)
        setting = parent.relative_to(root).as_posix() if inside and root is not None else parent.name
        return [_study_run(value, "" if setting == "." else setting, side, seed)]
    if {"row", "seed", "parameters"} <= value.keys():
        return [_ablation_row(value, path)]
    return None


def config_of_request(path: Path) -> dict:
    """The run's configuration in a ``request.json``. Earlier versions wrote it without the measurements."""
    values = checks.read_json(path)
    return values.get("config", values)


def result_fields(value: dict) -> Fields:
    """The dictionary of a ``Result``."""
    name = value["eval"]
    run = (value.get("provenance") or {}).get("run") or {"setting": "", "side": value["model"], "seed": 0}
    about = {**run, "metrics": {name: value["metrics"]}}
    return {**about, "rows": {name: value.get("rows") or []}, "provenance": {name: dict(value.get("provenance") or {})}}


def split_name(name: str) -> tuple[str, int]:
    """Side and seed of names such as ``diff-seed0``; seed 0 for any other name."""
    found = re.fullmatch(r"(.+)-seed(\d+)", str(name))
    return (found[1], int(found[2])) if found else (str(name), 0)


def _comparison(value: dict) -> list[Fields]:
    """Parts of one record a model: the pair's with rows and curves, a variant's with the numbers of its table row."""
    said = value.get("train")
    train: dict = said if isinstance(said, dict) else {}
    config, setting = train.get("config") or {}, str(value.get("recipe") or "")
    seeds = train.get("seeds") or []

    def part(entry: dict, **fields: dict) -> Fields:
        side, seed = split_name(entry.get("model", ""))
        side, seed = str(entry.get("attention", side)), entry.get("seed", seed)
        seed = seed if isinstance(seed, int) else 0
        mine = {**config, "model": {**config.get("model", {}), "attention": side}} if config else {}
        if config and seed < len(seeds):
            mine["train"] = {**config["train"], "seed": seeds[seed]}
        about = {"training": value.get("provenance") or {}, **fields.pop("provenance", {})}
        return {"setting": setting, "side": side, "seed": seed, "config": mine, "provenance": about, **fields}

    found = [part(entry, curves=_curves(entry)) for entry in _dicts(value.get("curves"))]
    for entry in _dicts(value.get("evals")):
        if "eval" in entry and isinstance(entry.get("metrics"), dict):
            name, curves = entry["eval"], entry["curves"] if isinstance(entry.get("curves"), dict) else {}
            measured = {"metrics": {name: entry["metrics"]}, "rows": {name: entry.get("rows") or []}}
            found.append(part(entry, **measured, curves=curves, provenance={name: dict(entry.get("provenance") or {})}))
    texts: dict[tuple, Fields] = {}
    for entry in _dicts(value.get("explorer")):
        one = part(entry, rows={"explorer": []})
        texts.setdefault((one["side"], one["seed"]), one)["rows"]["explorer"].append(entry)
    found += texts.values()
    known = {(one["side"], one["seed"], name) for one in found for name in one.get("metrics", {})}
    said = value.get("pair")
    pair: dict = said if isinstance(said, dict) else {}
    rows = {side: {"variant": side, **pair[side]} for side in PAIR if isinstance(pair.get(side), dict)}
    for row in _dicts(value.get("variants")):
        rows[str(row.get("variant"))] = {**rows.get(str(row.get("variant")), {}), **row}
    # The pair was timed again beside the variants, so their speeds are not to be compared with its claim.
    timed_twice = any(name == "throughput" for *_, name in known)
    for row in rows.values():
        for one in _variant(row, setting, config):
            lost = {name for side, seed, name in known if (side, seed) == (one["side"], one["seed"])}
            lost |= {"throughput"} if timed_twice else set()
            for kind in ("metrics", "curves"):
                one[kind] = {name: of for name, of in one[kind].items() if name not in lost}
            found.append(one)
    return found


_COSTS = ("parameters", "flops_per_token", "kv_bytes_per_token", "intermediate_size")


def _variant(row: dict, setting: str, config: dict) -> list[Fields]:
    """A model's row of the table of variants, or its entry of ``pair``, by seed."""

    def seeds(name: str) -> dict:
        return row[name] if isinstance(row.get(name), dict) else {}

    made = []
    cost = {name: row[name] for name in _COSTS if isinstance(row.get(name), int | float)}
    for seed in seeds("loss") or {"0": None}:
        loss, recall = seeds("loss").get(seed), seeds("recall").get(seed)
        metrics: dict[str, dict] = {"model": cost} if cost else {}
        if loss is not None:
            metrics["associative_recall"] = {"validation": loss}
        found = {cell: of[seed] for cell, of in seeds("needles").items() if isinstance(of, dict) and seed in of}
        metrics |= {"needle": found} if found else {}
        speed = {way: value for way, value in row.items() if way.endswith("_tokens_per_second")}
        metrics |= {"throughput": speed} if speed and seed == "0" else {}
        curves = {}
        if isinstance(recall, dict):
            metrics["recall"], curves["recall"] = recall.get("metrics") or {}, recall.get("curve") or {}
        about = {"setting": setting, "side": str(row.get("variant")), "seed": int(seed)}
        mine = {**config, "model": row.get("config") or {}} if config else {}
        made.append({**about, "config": mine, "metrics": metrics, "curves": curves})
    return made


def _curves(entry: dict) -> dict[str, dict]:
    names = ("step", "loss", "grad_norm", "tokens_per_second")
    curves: dict[str, dict] = {"training": {name: entry[name] for name in names if name in entry}}
    if "validation_step" in entry:
        curves["validation"] = {"step": entry["validation_step"], "loss": entry["validation_loss"]}
    if entry.get("lambda"):
        curves["lambda"] = {"step": entry["step"], "layers": entry["lambda"], "init": entry.get("lambda_init") or []}
    return curves


def _study_run(value: dict, setting: str, side: str, seed: int) -> Fields:
    tokens = value["tokens_per_step"]
    config = {
        "model": value["model"],
        "data": {"length": tokens},  # in total per step; rows and their length were not saved
        "optim": {"lr": value.get("lr")},
        "train": {"seed": value.get("seed"), "steps": value.get("steps"), "batch_size": 1},
    }
    curves = {name: value[name] for name in ("training", "validation", "sources") if value.get(name)}
    if value.get("lambda"):
        curves["lambda"] = {"step": [value["steps"]], "layers": [value["lambda"]]}
    about = {**value.get("provenance", {}), "seconds": value.get("seconds")}
    metrics = dict(value.get("metrics") or {})
    if "gradients" in value:
        metrics["gradients"] = value["gradients"]
    return {
        "setting": setting,
        "side": side,
        "seed": seed,
        "config": config,
        "metrics": metrics,
        "curves": curves,
        "provenance": {"training": about},
        "diverged": value.get("diverged"),
    }


def _ablation_row(value: dict, path: Path | None) -> Fields:
    known = path is not None and (path.parent / "request.json").exists()
    config = config_of_request(path.parent / "request.json") if known and path is not None else {}
    side, seed = (value["row"], value["seed"]) if path is None else split_name(path.parent.name)
    numbers = ("validation", "ar_hit", "others", "ar_hit_share")
    metrics = {name: value[name] for name in numbers if value.get(name) is not None}
    about = {"setting": "ablation", "side": side, "seed": seed, "config": config}
    return {**about, "metrics": {"associative_recall": metrics}, "rows": {"ablation": [value]}}


def _uptraining(value: dict) -> list[Fields]:
    """Continued training of one Transformer: ``curves`` by arm and seed; ``rates`` holds final losses only."""
    about, made = {"training": value.get("provenance") or {}}, []
    for side, seeds in value["curves"].items():
        for seed, curve in seeds.items():
            curves = {"validation": {"step": curve["step"], "loss": curve["loss"]}}
            if "lambda" in curve:
                curves["lambda"] = {"step": curve["step"][-1:], "layers": [curve["lambda"]]}
            metrics = {"start": value["start"][side]} if side in value["start"] else {}
            run = {"setting": "uptraining", "side": side, "seed": int(seed)}
            made.append({**run, "metrics": metrics, "curves": curves, "provenance": about})
    for rate, sides in value.get("rates", {}).items():
        for side, loss in sides.items():
            run = {"setting": f"rates/lr{rate}", "side": side, "seed": 0, "config": {"optim": {"lr": float(rate)}}}
            made.append({**run, "curves": {"validation": {"step": [], "loss": [loss]}}})
    return made


def _dicts(value: object) -> list[dict]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
