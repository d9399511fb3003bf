"""Relatives of differential attention beside the pair of a comparison, each at the cost of the pair."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from diff_transformer.durable import write_whole
from diff_transformer.evals.types import Result
from diff_transformer.model.config import DiffTransformerConfig
from diff_transformer.model.cost import model_cost
from diff_transformer.model.matching import LABELS, VARIANTS, variant
from diff_transformer.train.config import RunConfig

_SIZES = ("num_key_value_heads", "value_head_dim", "intermediate_size")  # what keeps the cost equal
_SPEEDS = ("train_tokens_per_second", "forward_tokens_per_second")


def known_variants(names: Iterable[str], out: Path, pair: Sequence[str]) -> list[str]:
    """The variants of a comparison: those asked for and those that ``out`` has from an earlier call; the ``pair`` is
    there anyway.

    Raises:
        ValueError: for a name that is not in ``VARIANTS``.
    """
    names, path = list(names), out / "variants.json"
    unknown = [name for name in names if name not in VARIANTS]
    if unknown:
        raise ValueError(f"no variant {', '.join(map(repr, unknown))}; there are: {', '.join(VARIANTS)}")
    earlier = json.loads(path.read_text()) if path.exists() else []
    return [name for name in dict.fromkeys([*earlier, *names]) if name not in pair]


def variant_model(config: RunConfig, name: str) -> dict[str, Any]:
    """``config.model`` for the variant ``name``: its fields, and sizes that keep the pair's cost.

    Raises:
        ValueError: if the variant cannot be made of the configuration's heads.
    """
    fields: dict[str, Any] = {**config.model, "attention": "softmax"}
    made = variant(DiffTransformerConfig(**fields), name)
    model = {**config.model, **VARIANTS[name], **{size: getattr(made, size) for size in _SIZES}}
    DiffTransformerConfig(**model)
    return model


def variant_folders(config: RunConfig, out: Path, names: Sequence[str], seeds: int) -> list[Path]:
    """The folders of the variants' members, with their requests; remembers ``names`` in ``out``."""
    if not names:
        return []
    write_whole(out / "variants.json", json.dumps(list(names)))
    folders = []
    for seed in range(seeds):
        for name in names:
            folder = out / "members" / f"{name}-seed{seed}"
            folder.mkdir(parents=True, exist_ok=True)
            train = dataclasses.replace(config.train, seed=config.train.seed + seed)
            dataclasses.replace(config, model=variant_model(config, name), train=train).save(folder / "request.json")
            folders.append(folder)
    return folders


def variant_rows(config: RunConfig, names: Sequence[str], results: Sequence[Result], speeds: Sequence[Result]) -> list:
    """A row a model: cost, and by seed the loss on held-out text and the needles found in each cell.

    ``results``: of all members. ``speeds``: throughput of all models, measured together, of the first seed.
    """
    rows = []
    for name in names:
        made = DiffTransformerConfig(**variant_model(config, name))
        cost = model_cost(made, length=config.data.length)
        row: dict[str, Any] = {
            "variant": name,
            "label": LABELS[name],
            "config": made.to_diff_dict(),
            "parameters": cost.total_parameters,
            "flops_per_token": cost.flops_per_token,
            "kv_bytes_per_token": cost.kv_bytes_per_token,
            "intermediate_size": made.intermediate_size,
            "loss": {},
            "needles": {},
        }
        for result in results:
            owner, seed = result.model.split("-seed")
            if owner == name and result.eval == "associative_recall":
                row["loss"][seed] = result.metrics["validation"]
            elif owner == name and result.eval == "needle":
                for n, r in config.evaluation.needles:
                    row["needles"].setdefault(f"n{n}_r{r}", {})[seed] = result.metrics[f"n{n}_r{r}"]
        for speed in speeds:
            if speed.model.split("-seed")[0] == name:
                row |= {way: speed.metrics[way] for way in _SPEEDS}
        rows.append(row)
    return rows
