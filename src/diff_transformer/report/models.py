"""The records that a page shows, sorted by model. A model has the same name, colour and mark on the whole page."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from diff_transformer.errors import UserError
from diff_transformer.lab.claims import judge
from diff_transformer.lab.quantities import Quantity
from diff_transformer.lab.record import Record, RecordError, records_of
from diff_transformer.lab.sides import CONTROLS, NAMES, PAIR, name_of
from diff_transformer.report.figure import Figure, Finding, found_of, key, versus
from diff_transformer.report.markup import Html, is_number, join, mean, number, plural, tag

SIDES = PAIR
OF_TRAINING = ("gradients", "model", "start")  # metrics of a record that no experiment measured
STYLES = 6  # colours and marks beside those of the pair: s1 to s6
BY_DATA = (
    "many_shot",
)  # experiments that show each data set separately: results on two sets do not contradict each other


class ResultsError(UserError):
    """The input cannot be shown as a page; the message says what to give instead."""


@dataclass(frozen=True)
class Results:
    """The content of a page.

    Attributes:
        records: of every model; rows and metrics by experiment, curves of training.
        about: a comparison's claims, configuration and provenance, as ``compare`` wrote them; else empty.
    """

    records: list[Record]
    about: dict = field(default_factory=dict)

    def sides(self) -> list[str]:
        """The sides of a comparison's records, the pair first."""
        named = dict.fromkeys(record.side for record in self.records)
        return sorted(named, key=lambda side: PAIR.index(side) if side in PAIR else len(PAIR))

    def styles(self) -> dict[str, str]:
        """For each of ``sides`` its colour and mark, the same on the whole page."""
        sides = self.sides()
        kinds = {record.side: record.side if record.side in NAMES else record.attention for record in self.records}
        return dict(zip(sides, sides_of([kinds[side] for side in sides], sides), strict=True))

    def measurements(self, *evals: str) -> Iterator["Measurement"]:
        """Each experiment on each model; only those of ``evals`` if any is named."""
        for record in self.records:
            for name in record.metrics:
                if name in evals or (not evals and name not in OF_TRAINING):
                    yield Measurement(record, name)


def of_comparison(value: dict) -> Results:
    """The ``results.json`` of a comparison: records of the pair and of the variants; settings stay in ``about``.

    Raises:
        ResultsError: if a part of it has another form.
    """
    parts = {key: dicts(value.get(key)) for key in ("curves", "evals", "explorer", "variants")}
    try:
        return Results(records_of({"schema": 1, "pair": as_dict(value.get("pair")), **parts}), value)
    except (RecordError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultsError(f"these are not the results of a comparison: {error!r}") from None


@dataclass(frozen=True)
class Measurement:
    """One experiment on one model: a part of a record."""

    record: Record
    eval: str

    @property
    def metrics(self) -> dict[str, float]:
        """Those that are finite numbers."""
        return {str(k): float(v) for k, v in as_dict(self.record.metrics[self.eval]).items() if is_number(v)}

    @property
    def rows(self) -> list[dict]:
        """A dictionary an example."""
        return dicts(self.record.rows.get(self.eval))

    @property
    def provenance(self) -> dict:
        return as_dict(self.record.provenance.get(self.eval))

    @property
    def data(self) -> str:
        """The data set of an experiment that shows its data sets separately; empty for others."""
        return str(self.provenance.get("data") or "") if self.eval in BY_DATA else ""


@dataclass(frozen=True)
class Series:
    """One model.

    Attributes:
        side: its own colour and mark, as ``Line`` and ``category_chart`` take it.
        label: its name on the page.
        attention: "diff", "softmax", ..., or None if the results do not say.
        metrics: finite metrics by seed.
        parts: the experiments of the metrics, with rows and provenance.
    """

    side: str
    label: str
    attention: str | None
    metrics: dict[int, dict[str, float]] = field(default_factory=dict)
    parts: list[Measurement] = field(default_factory=list)

    def seeds(self, name: str) -> dict[int, float]:
        """The metric ``name`` by seed; seeds that lack it are absent."""
        return {seed: values[name] for seed, values in self.metrics.items() if name in values}

    def mean(self, name: str) -> float | None:
        """The mean over seeds of one metric, or None."""
        return mean(self.seeds(name))

    def cost(self, name: str) -> float | None:
        """A number of ``metrics["model"]``, which no experiment measured."""
        found = (as_dict(part.record.metrics.get("model")).get(name) for part in self.parts)
        return next((value for value in found if isinstance(value, int | float) and is_number(value)), None)

    def names(self) -> list[str]:
        """Every metric that some seed has, in order of appearance."""
        return list(dict.fromkeys(name for values in self.metrics.values() for name in values))

    def rows(self) -> list[dict]:
        """The rows of all its experiments."""
        return [row for part in self.parts for row in part.rows]


def models_in(results: Results, *evals: str) -> list[Series]:
    """The models with one of ``evals`` (all models if none is named), in order of appearance.

    Seeds of one model form one series, also across separate experiments. Models of one name are told apart by their
    weights and called by their paths. Two contradicting results of the same model, seed and experiment form two series,
    the second called "NAME (2)". If an experiment of ``BY_DATA`` has several data
    sets, its metrics are called "DATA: METRIC".
    """
    found: list[Series] = []
    for part in results.measurements():
        if not part.metrics:
            continue
        name, attention = _name(results, part), _attention(results, part)
        same = [one for one in found if (_name(results, one.parts[0]), one.attention) == (name, attention)]
        home = next((one for one in same if _agrees(one, part)), None)
        if home is None:
            home = Series("", name, attention)
            found.append(home)
        home.parts.append(part)
    labels = _labels([one.label for one in found], [one.parts[0].record.model for one in found])
    found = [replace(one, label=label) for one, label in zip(found, labels, strict=True)]
    shown = []
    drawn = sides_of([one.attention for one in found], [one.parts[0].record.side for one in found])
    for one, side in zip(found, drawn, strict=True):
        parts = [part for part in one.parts if not evals or part.eval in evals]
        several = len({part.data for part in parts if part.data}) > 1
        metrics: dict[int, dict[str, float]] = {}
        for part in parts:
            before = f"{part.data}: " if several and part.data else ""
            metrics.setdefault(part.record.seed, {}).update({f"{before}{k}": v for k, v in part.metrics.items()})
        if parts:
            shown.append(Series(side, one.label, one.attention, metrics, parts))
    return shown


def noted(figure: Figure, results: Results, name: str) -> Figure:
    """``figure`` of the experiment ``name``, with the ``note`` of each of its results as the first findings.

    Results also say there how the model was ``asked``, where that is not the experiment's own way."""
    said = [
        (part, part.provenance.get(key)) for part in results.measurements(name) for key in ("note", "asked", "repeated")
    ]
    notes = [f"{_name(results, part)}: {words}." for part, words in said if words]
    return replace(figure, findings=[*(Finding("note", note) for note in dict.fromkeys(notes)), *figure.findings])


def _name(results: Results, part: Measurement) -> str:
    side, setting = part.record.side, part.record.setting
    if results.about:
        return name_of(side) or "model"
    several = not results.about and len({record.setting for record in results.records}) > 1
    return f"{side or 'model'}, {setting}" if several and setting else side or "model"


def _attention(results: Results, part: Measurement) -> str | None:
    if results.about and part.record.side in NAMES:
        return part.record.side
    said = part.provenance.get("attention")
    return said if isinstance(said, str) else None


def _labels(names: list[str], models: list[tuple[str, str] | None]) -> list[str]:
    """The names, all different: models of one name get as much of their paths as tells them apart, else a number."""
    labels = list(names)
    for name in dict.fromkeys(names):
        places = [place for place, other in enumerate(names) if other == name]
        paths = [Path(model[0]).parts if (model := models[place]) else () for place in places]
        depth = next((d for d in range(1, 9) if len({path[-d:] for path in paths}) == len(places)), 0)
        for nth, (place, path) in enumerate(zip(places, paths, strict=True), 1):
            if len(places) > 1 and depth and path:
                labels[place] = "/".join(path[-depth:])
            elif nth > 1:
                labels[place] = f"{name} ({nth})"
    return labels


def _agrees(one: Series, part: Measurement) -> bool:
    """True if the series has no other value for a metric of the same experiment, seed and data, and no other model."""
    if any(p.record.identity == part.record.identity and not p.record.may_be(part.record) for p in one.parts):
        return False
    metrics = part.metrics
    others = [p for p in one.parts if (p.eval, p.record.seed, p.data) == (part.eval, part.record.seed, part.data)]
    return all(metrics.get(k, v) == v for other in others for k, v in other.metrics.items())


def side_of(attention: str | None) -> str:
    """``softmax`` for a Transformer, ``diff`` for a differential attention."""
    return "softmax" if str(attention).startswith("softmax") else "diff"


def sides_of(attention: Sequence[str | None], names: Sequence[str] = ()) -> list[str]:
    """A style for each model, by its attention or None.

    A model that is the only one of its kind has the pair's style for that kind; among several, the one that is called
    as the pair's. The control has s1. Others have s1 to s6, then the same again with a suffix.

    Args:
        names: of the models.
    """
    kinds = [None if one is None else side_of(one) for one in attention]
    named = list(names) or [""] * len(kinds)
    sides: list[str] = []
    place = -1 + any(name in CONTROLS for name in named)
    for kind, name in zip(kinds, named, strict=True):
        own = name == kind if named.count(str(kind)) == 1 else kinds.count(kind) == 1
        if kind is not None and own:
            sides.append(kind)
            continue
        if name in CONTROLS:
            sides.append("s1")
            continue
        place += 1
        again = f" again{place // STYLES}" if place >= STYLES else ""
        sides.append(f"s{place % STYLES + 1}{again}")
    return sides


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


def control_in(models: list[Series]) -> Series | None:
    """The Transformer + head norm, or the wider one."""
    return next((one for one in models if one.parts and one.parts[0].record.side in CONTROLS), None)


def judged(results: Results, quantity: Quantity, ours: Series, theirs: Series) -> dict | None:
    """A row of the table of claims about a quantity of two models: values by seed, the difference and its interval.

    So a quantity has the same interval wherever it stands. None if the records hold no examples of it.
    """
    stored = next((claim for claim in dicts(results.about.get("claims")) if claim.get("id") == quantity.id), None)
    if stored is not None and (ours.side, theirs.side) == PAIR:
        return stored if as_dict(stored.get("difference")) else None
    control = as_dict(stored.get("control")) if stored else {}
    if control and ours.side == "diff" and theirs is control_in([theirs]):
        return {**control, "diff": (stored or {}).get("diff"), "softmax": control.get("values")}
    if len({part.data for one in (ours, theirs) for part in one.parts if part.eval == quantity.experiment}) > 1:
        return None
    records = [
        replace(part.record, side=side)
        for side, one in zip(PAIR, (ours, theirs), strict=True)
        for part in one.parts
        if part.eval == quantity.experiment
    ]
    try:
        return next(iter(judge([quantity], records)), None)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, ZeroDivisionError):
        return None  # rows of another form


def compared(
    what: str,
    models: list[Series],
    values: str | list[dict[int, float]],
    better: str,
    digits: int | None = 3,
    unit: str = "",
    *,
    of: tuple[Results, Quantity | None] | None = None,
) -> Finding | None:
    """A finding about one number: for a pair, which model is ahead, and how DIFF stands to the control; otherwise each
    model's value, the best first.

    Args:
        values: name of a metric, or for each of ``models`` its values by seed.
        better: "lower" or "higher".
        of: the results and the quantity, whose interval is then that of the claims.

    None if fewer than two models have the number.
    """
    by_model = [one.seeds(values) for one in models] if isinstance(values, str) else values
    known = [(one, v) for one, v in zip(models, by_model, strict=True) if v]
    if len(known) < 2:
        return None
    pair = pair_in([one for one, _ in known])
    if pair:
        by_side = {one.side: v for one, v in known}

        def found(other: Series) -> Finding | None:
            claim = judged(of[0], of[1], pair[0], other) if of and of[1] else None
            if claim:
                return found_of(what, claim, better, digits, unit)
            return versus(what, by_side["diff"], by_side[other.side], better, digits, unit)

        first, control = found(pair[1]), control_in([one for one, _ in known])
        beside = found(control) if control else None
        if first is None or beside is None or control is None:
            return first
        said = number(mean(by_side[control.side]), digits)
        return replace(first, text=f"{first.text[:-1]}; against the {control.label}, {said}{unit}: {beside.gap}.")
    ranked = sorted(known, key=lambda one: mean(one[1]) or 0.0, reverse=better == "higher")
    said = ", ".join(
        f"{one.label} {number(mean(v), digits)}{unit}" + (f" ({plural(len(v), 'seed')})" if len(v) > 1 else "")
        for one, v in ranked
    )
    return Finding("note", f"{what} ({better} is better): {said}.")


def seeds_by_side(results: Results) -> dict[str, list[int]]:
    """The seeds with a training curve, by side."""
    found: dict[str, list[int]] = {}
    for record in results.records:
        if record.curves.get("training"):
            found.setdefault(record.side, []).append(record.seed)
    return found


def dicts(value: object) -> list[dict]:
    """The dictionaries of a list; anything else counts as absent."""
    return [v for v in value if isinstance(v, dict)] if isinstance(value, list) else []


def as_dict(value: object) -> dict:
    """The dictionary itself, or an empty one."""
    return value if isinstance(value, dict) else {}
