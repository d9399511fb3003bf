"""Any number of models inside the results: what each is called, how it is drawn, and its numbers by seed.

A model keeps its colour and mark on the whole page. In a comparison the two models are DIFF and Transformer, as ever.
"""

import re
from dataclasses import dataclass, field

from diff_transformer.report.charts import NAMES
from diff_transformer.report.figure import key
from diff_transformer.report.findings import Finding, versus
from diff_transformer.report.markup import Html, join, tag
from diff_transformer.report.numbers import is_number, mean, number, plural
from diff_transformer.report.pair import as_dict, dicts, seed_of, side_of

STYLES = 6  # colours and marks in the style sheet beside those of the pair: s1 to s6
APART = ("many_shot",)  # experiments that show each data set by itself: another one contradicts nothing
_SEED = re.compile(r"(.+)-seed(\d+)")


@dataclass(frozen=True)
class Series:
    """One model.

    Attributes:
        side: its CSS class, unlike that of every other model: what ``Line``, ``mark`` and ``category_chart`` take.
        label: its name for the reader.
        attention: "diff", "softmax", ..., or None where the results do not say.
        metrics: finite metrics by seed (of training, or else of the data).
        entries: its entries of ``results["evals"]``, with rows and provenance.
    """

    side: str
    label: str
    attention: str | None
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    entries: list[dict] = field(default_factory=list)

    def seeds(self, name: str) -> dict[int, float]:
        """The metric ``name`` by seed; seeds that lack it are absent."""
        return {seed: values[name] for seed, values in self.metrics.items() if name in values}

    def mean(self, name: str) -> float | None:
        """The mean over seeds of one metric, or None."""
        return mean(self.seeds(name))

    def names(self) -> list[str]:
        """Every metric that some seed has, in the order they came."""
        return list(dict.fromkeys(name for values in self.metrics.values() for name in values))

    def rows(self) -> list[dict]:
        """The rows of all its entries."""
        return [row for entry in self.entries for row in dicts(entry.get("rows"))]


def models_in(results: dict, *evals: str) -> list[Series]:
    """The models that have one of ``evals`` (all models if none is named), in the order in which they came.

    Results of one model are one series: seeds side by side, and together what was measured apart (other metrics). Two
    results with the same model, seed and metrics but other values are two series, the second called "NAME (2)". Where
    an experiment of ``APART`` has several data sets, its metrics are called "DATA: METRIC".
    """
    found: list[Series] = []
    for entry in dicts(results.get("evals")):
        if not finite_metrics(entry):
            continue
        name, attention = model = _identity(entry)
        same = [one for one in found if _identity(one.entries[0]) == model]
        home = next((one for one in same if _takes(one, entry)), None)
        if home is None:
            home = Series("", f"{name} ({len(same) + 1})" if same else name, attention)
            found.append(home)
        home.entries.append(entry)
    shown = []
    for one, side in zip(found, sides_of([one.attention for one in found]), strict=True):
        entries = [entry for entry in one.entries if not evals or entry.get("eval") in evals]
        several = len({_data(entry) for entry in entries if _data(entry)}) > 1
        metrics: dict[int, dict[str, float]] = {}
        for entry in entries:
            before = f"{_data(entry)}: " if several and _data(entry) else ""
            mine = {f"{before}{name}": value for name, value in finite_metrics(entry).items()}
            metrics.setdefault(_seed(entry), {}).update(mine)
        if entries:
            shown.append(Series(side, one.label, one.attention, metrics, entries))
    return shown


def finite_metrics(entry: dict) -> dict[str, float]:
    """The metrics of one entry that are finite numbers."""
    return {str(k): float(v) for k, v in as_dict(entry.get("metrics")).items() if is_number(v)}


def names_of(models: list[Series]) -> dict[str, str]:
    """Label by side: the ``names`` of ``category_chart``."""
    return {one.side: one.label for one in models}


def legend_of(models: list[Series], *extra: Html) -> Html:
    """The models' colours, marks and names, the same on the whole page; ``extra`` is made by ``figure.key``."""
    return tag("p", join([*(key(one.side, one.label) for one in models), *extra]), class_="legend")


def pair_in(models: list[Series]) -> tuple[Series, Series] | None:
    """(DIFF, Transformer), where there is exactly one of each; else None."""
    by_side = {one.side: one for one in models}
    return (by_side["diff"], by_side["softmax"]) if {"diff", "softmax"} <= set(by_side) else None


def compared(
    what: str,
    models: list[Series],
    values: str | list[dict[int, float]],
    better: str,
    digits: int | None = 3,
    unit: str = "",
) -> Finding | None:
    """One sentence on one number: who is ahead in a pair alone, otherwise what each model has, the best first.

    Args:
        values: name of a metric, or for each of ``models`` its values by seed.
        better: "lower" or "higher".

    None where fewer than two models have the number.
    """
    by_model = [one.seeds(values) for one in models] if isinstance(values, str) else values
    known = [(one, v) for one, v in zip(models, by_model, strict=True) if v]
    if len(known) < 2:
        return None
    pair = pair_in([one for one, _ in known])
    if pair and len(known) == 2:
        by_side = {one.side: v for one, v in known}
        return versus(what, by_side["diff"], by_side["softmax"], better, digits, unit)
    ranked = sorted(known, key=lambda one: mean(one[1]) or 0.0, reverse=better == "higher")
    said = ", ".join(
        f"{one.label} {number(mean(v), digits)}{unit}" + (f" ({plural(len(v), 'seed')})" if len(v) > 1 else "")
        for one, v in ranked
    )
    return Finding("note", f"{what} ({better} is better): {said}.")


def _identity(entry: dict) -> tuple[str, str | None]:
    """Name and attention; entries of a comparison carry ``attention`` and are called as the page calls the pair."""
    said = entry.get("attention")
    if isinstance(said, str):
        return NAMES[side_of(entry)], said
    said = as_dict(entry.get("provenance")).get("attention")
    name = str(entry.get("model") or "model")
    apart = _SEED.fullmatch(name)
    return (apart[1] if apart else name), (said if isinstance(said, str) else None)


def _seed(entry: dict) -> int:
    apart = _SEED.fullmatch(str(entry.get("model") or ""))
    settings = as_dict(entry.get("provenance"))
    return seed_of(entry, otherwise=int(apart[2]) if apart else seed_of(settings))


def _takes(one: Series, entry: dict) -> bool:
    """Whether an entry fits in: no metric of the same eval and seed has another value."""
    metrics = finite_metrics(entry)
    others = [e for e in one.entries if _measured(e) == _measured(entry)]
    return all(metrics.get(k, v) == v for other in others for k, v in finite_metrics(other).items())


def _measured(entry: dict) -> tuple:
    return entry.get("eval"), _seed(entry), _data(entry)


def _data(entry: dict) -> str:
    """The data set of an experiment that keeps its data sets apart; empty for others."""
    return str(as_dict(entry.get("provenance")).get("data") or "") if entry.get("eval") in APART else ""


def sides_of(attention: list[str | None]) -> list[str]:
    """A CSS class for each model, by its attention or None: the pair's own where there is one model of that kind, else
    s1 to s6, and then again with a suffix."""
    kinds = [None if one is None else side_of({"attention": one}) for one in attention]
    sides: list[str] = []
    for kind in kinds:
        if kind is not None and kinds.count(kind) == 1:
            sides.append(kind)
            continue
        place = sum(side.startswith("s") and side != "softmax" for side in sides)
        again = f" again{place // STYLES}" if place >= STYLES else ""
        sides.append(f"s{place % STYLES + 1}{again}")
    return sides
