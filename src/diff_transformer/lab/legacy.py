"""Results that are no records, as the fields of a ``Record``: those of experiments, and the ``results.json`` of a
comparison, an export for people.

It knows no ``Record``: ``record.records_of`` makes records of what ``fields_of`` returns.
"""

from diff_transformer.lab.sides import PAIR

Fields = dict  # of a Record: setting, side, seed, and some of config, metrics, rows, curves, provenance and diverged


def fields_of(value: dict) -> list[Fields] | None:
    """The fields of the records in a JSON value; several with one setting, side and seed are parts of one record.

    Args:
        value: the result of an experiment or ``{"results": [...]}`` of several, or the ``results.json`` of a comparison
            (schema 1).

    Returns:
        None for a value of another form.
    """
    if {"eval", "model", "metrics"} <= value.keys():
        return [result_fields(value)]
    if isinstance(value.get("results"), list) and value.get("schema") != 1:
        return [result_fields(one) for one in value["results"]]
    if value.get("schema") == 1 and ("evals" in value or "curves" in value):
        return _comparison(value)
    return None


def result_fields(value: dict) -> Fields:
    """The dictionary of a ``Result``."""
    name = value["eval"]
    run = (value.get("provenance") or {}).get("run") or {"setting": "", "side": value["model"], "seed": 0}
    about = {**run, "metrics": {name: value["metrics"]}}
    return {**about, "rows": {name: value.get("rows") or []}, "provenance": {name: dict(value.get("provenance") or {})}}


def _comparison(value: dict) -> list[Fields]:
    """Parts of one record a model: the pair's with rows and curves, a variant's with the numbers of its table row."""
    said = value.get("train")
    train: dict = said if isinstance(said, dict) else {}
    config, setting = train.get("config") or {}, str(value.get("recipe") or "")
    seeds = train.get("seeds") or []

    def part(entry: dict, **fields: dict) -> Fields:
        side, seed = str(entry.get("attention", entry.get("model", ""))), entry.get("seed", 0)
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


def _dicts(value: object) -> list[dict]:
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []
