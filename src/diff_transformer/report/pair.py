"""The two models of the comparison inside the results: which side an entry belongs to, and its numbers by seed."""

from dataclasses import dataclass

from diff_transformer.report.numbers import is_number, mean

SIDES = ("diff", "softmax")


def side_of(entry: dict) -> str:
    """``softmax`` for the Transformer, ``diff`` for whichever differential attention was compared with it."""
    return "softmax" if entry.get("attention") == "softmax" else "diff"


def seed_of(entry: dict, otherwise: int = 0) -> int:
    """The seed of an entry; ``otherwise`` when it has none."""
    seed = entry.get("seed")
    return int(seed) if isinstance(seed, int | float) and is_number(seed) else otherwise


def dicts(value: object) -> list[dict]:
    """The dictionaries of a list; anything else counts as absent."""
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def as_dict(value: object) -> dict:
    """The dictionary itself, or an empty one."""
    return value if isinstance(value, dict) else {}


@dataclass(frozen=True)
class Measured:
    """One eval of both models: ``by_side[side][seed]`` is a dictionary of finite metrics."""

    by_side: dict[str, dict[int, dict[str, float]]]

    def seeds(self, side: str, key: str) -> dict[int, float]:
        """The metric ``key`` of one side, by seed; seeds that lack it are absent."""
        return {seed: m[key] for seed, m in self.by_side.get(side, {}).items() if key in m}

    def mean(self, side: str, key: str) -> float | None:
        """The mean over seeds of one metric, or None."""
        return mean(self.seeds(side, key))

    def names(self) -> list[str]:
        """Every metric that some model has, in the order they came."""
        return list(dict.fromkeys(k for seeds in self.by_side.values() for m in seeds.values() for k in m))


def measured(results: dict, name: str) -> Measured | None:
    """The eval ``name`` of both sides, or None when no model has it."""
    by_side: dict[str, dict[int, dict[str, float]]] = {}
    for place, entry in enumerate(dicts(results.get("evals"))):
        metrics = {str(k): float(v) for k, v in as_dict(entry.get("metrics")).items() if is_number(v)}
        if entry.get("eval") == name and metrics:
            by_side.setdefault(side_of(entry), {})[seed_of(entry, place)] = metrics
    return Measured(by_side) if by_side else None


def seeds_by_side(results: dict) -> dict[str, list[int]]:
    """The seeds with a training curve, by side."""
    found: dict[str, list[int]] = {}
    for curve in dicts(results.get("curves")):
        found.setdefault(side_of(curve), []).append(seed_of(curve))
    return found
