"""The registry of quantities: what is measured on a model, its unit, how the paper says it differs, and how that is
tested. Claims, tables of studies, figures and pages read it.

A quantity has one value a model (``read``) and one interval for a difference of two models (``difference``). The
interval is over training seeds and evaluation examples if there are at least three seeds, and over examples if not:
then it covers *these* trained models, and another seed may give another result. A largest value has none over examples,
because its bootstrap covers too seldom.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

import diff_transformer.lab.paper as paper
from diff_transformer.lab.record import Record
from diff_transformer.lab.stats import (
    SEEDS_FOR_AN_INTERVAL,
    Interval,
    OverExamples,
    mean,
    over_examples,
    over_seeds,
    over_seeds_and_examples,
)

Rows = list[dict]  # of one experiment, as a record has them
Scores = Callable[[Rows], np.ndarray]  # for each example, the values of its score: [examples, ...]


@dataclass(frozen=True)
class Quantity:
    """A number of a model.

    Attributes:
        name: what tables call it.
        read: the number of a record, or None if the record lacks it.
        better: how DIFF should differ according to the paper, "lower" or "higher"; "" where the paper says nothing.
        untested: why a baseline's record cannot test the claim; "" where it can.
        id: its key in the registry.
        experiment, key: where ``read`` finds it, ``record.metrics[experiment][key]``; "" for a number of a curve.
        unit: of the number.
        kind: "measured", or "computed" from the configuration.
        claim: the paper's statement, or ours; "" for what only stands in tables.
        paper: the paper's numbers, Transformer / DIFF; a dagger marks a third party's transcription.
        source: tables and figures of the paper.
        scores: the score of each example, from the rows of ``experiment``; None if only ``read`` gives the number.
        reduce: from scores to the model's number.
        largest: whether ``reduce`` takes a largest value, which has no bootstrap interval.
        margin: how far on the wrong side of zero the difference may lie while the claim still holds.
        relative: compare by DIFF / Transformer - 1 instead of DIFF - Transformer.
        ours: the paper does not make the claim; it stands apart and never counts among the paper's.
    """

    name: str
    read: Callable[[Record], float | None]
    better: str = ""
    untested: Callable[[Record], str] | None = None
    id: str = ""
    experiment: str = ""
    key: str = ""
    unit: str = ""
    kind: str = "measured"
    claim: str = ""
    paper: str = ""
    source: str = ""
    scores: Scores | None = field(default=None, repr=False)
    reduce: Callable[[np.ndarray], float] = mean
    largest: bool = False
    margin: float = 0.0
    relative: bool = False
    ours: bool = False

    def value(self, record: Record) -> float:
        """The number from the rows of examples, else from the metrics; NaN if there is none."""
        scores = self.scored(record)
        if scores is not None:
            return float(self.reduce(scores)) if scores.size else math.nan
        found = self.read(record)
        return math.nan if found is None else found

    def scored(self, record: Record) -> np.ndarray | None:
        """The score of each example; None if the record has no rows of them, or keeps other columns."""
        rows = record.rows.get(self.experiment)
        try:
            return self.scores(rows) if rows and self.scores else None
        except KeyError:
            return None

    def why_untested(self, baselines: Sequence[Record]) -> str:
        """Why most of the baselines cannot test the claim, or ""."""
        reasons = [said for record in baselines if self.untested and (said := self.untested(record))]
        return reasons[0] if len(reasons) > len(baselines) / 2 else ""


def difference(quantity: Quantity, ours: Sequence[Record], theirs: Sequence[Record]) -> tuple[Interval, OverExamples]:
    """The difference of two models, paired by seed, with its interval, and what of its variance is over examples.

    Args:
        ours, theirs: a record for each seed, in the same order. All have the quantity.
    """
    few, relative = len(ours) < SEEDS_FOR_AN_INTERVAL, quantity.relative
    scored = [[found for record in side if (found := quantity.scored(record)) is not None] for side in (ours, theirs)]
    if any(len(found) < len(ours) for found in scored):
        values = [(quantity.value(a), quantity.value(b)) for a, b in zip(ours, theirs, strict=True)]
        found = over_seeds([a / b - 1 if relative else a - b for a, b in values])
        return found._replace(low=None, high=None) if few else found, OverExamples()
    if few:
        found = over_examples(*scored, quantity.reduce, relative=relative)
        return found._replace(low=None, high=None) if quantity.largest else found, OverExamples()
    return over_seeds_and_examples(*scored, quantity.reduce, relative=relative)


def metric(experiment: str, key: str, better: str = "", name: str | None = None, *, over: str = "", **more) -> Quantity:
    """The metric ``key`` of ``experiment``, divided by its metric ``over`` if that is given."""

    def read(record: Record) -> float | None:
        found = record.metrics.get(experiment, {})
        if not over or found.get(key) is None:
            return found.get(key)
        return found[key] / found[over] if found.get(over) else None

    return Quantity(name or f"{experiment} {key}", read, better, experiment=experiment, key=key, **more)


# ---- scores of examples


def _column(name: str) -> Scores:
    return lambda rows: np.array([row[name] for row in rows], dtype=float)


def _columns(*names: str) -> Scores:
    return lambda rows: np.array([[row[name] for name in names] for row in rows], dtype=float)


def _ratio_of_sums(values: np.ndarray) -> float:
    sums = values.sum(0)
    return float(sums[0] / sums[1]) if sums[1] else math.nan


def _in_medians(values: np.ndarray) -> float:
    """The largest value of all texts divided by the median over texts, from rows of (largest, median)."""
    return float(values[:, 0].max() / np.median(values[:, 1]))


def loss_up_to(edges: Sequence[int], position: int) -> Scores:
    """For each book, its mean loss over the first ``position`` tokens: [books]; ``edges`` are those of its bins."""
    bins = sum(edge <= position for edge in edges[1:])
    return lambda rows: np.array([sum(row["sums"][:bins]) / sum(row["counts"][:bins]) for row in rows])


def _whole_length(rows: Rows) -> np.ndarray:
    """For each book, the mean loss over the whole length: [books]."""
    return np.array([sum(row["sums"]) / sum(row["counts"]) for row in rows])


def _cost_of_four_bits(rows: Rows) -> np.ndarray:
    """For each row of text, its loss with 4-bit logits minus its loss with the most bits; empty without either."""
    losses: dict[int, list[float]] = {}
    for row in rows:
        if "loss" in row:
            losses.setdefault(row["bits"], []).append(row["loss"])
    return np.array(losses[4]) - np.array(losses[max(losses)]) if 4 in losses else np.array([])


def _orders(order: str) -> Scores:
    """Score of each question under each order of the examples, at the largest number: [questions, orders]."""

    def scores(rows: Rows) -> np.ndarray:
        rows = [row for row in rows if row["order"] == order]
        largest = max((row["shots"] for row in rows), default=0)
        by_seed: dict[int, list[float]] = {}
        for row in rows:
            if row["shots"] == largest:
                by_seed.setdefault(row["order_seed"], []).append(row["score"])
        return np.array(list(by_seed.values())).T

    return scores


def _recalled(rows: Rows) -> np.ndarray:
    """For each row of the trained length, the share of its questions that is answered right."""
    shortest = min(row["length"] for row in rows)
    kept = [np.array(row["hits"]) / row["questions"] for row in rows if row["length"] == shortest]
    return np.concatenate(kept)


def _margin(scores: np.ndarray) -> float:
    """Best minus worst accuracy over the orders."""
    accuracies = scores.mean(0)
    return float(accuracies.max() - accuracies.min())


def _mean_of_decided(scores: np.ndarray) -> float:
    return float(np.nanmean(scores)) if np.isfinite(scores).any() else math.nan


# ---- what a Transformer cannot test


def _recalls_little(record: Record) -> str:
    """Its loss is not lower where the context can be recalled, as the paper's models' is (.898, 3.272)."""
    hit, others = (QUANTITIES[name].value(record) for name in ("ar_hit", "others"))
    if hit <= others:
        return ""
    return f"the Transformer does not recall there: its loss elsewhere is lower, {others:.3f} (the paper: higher)"


def _finds_few(record: Record) -> str:
    found = QUANTITIES["needle_n1_r1"].value(record)
    return "the Transformer itself finds fewer than half" if found < 0.5 else ""


# ---- the registry


def needle(n: int, r: int) -> Quantity:
    """The accuracy of ``r`` of ``n`` needles."""
    single = n == 1
    name = "1 needle" if single else f"{n} needles, {r} asked for"

    def scores(rows: Rows) -> np.ndarray:
        return np.array([row["score"] for row in rows if (row["needles"], row["queries"]) == (n, r)], dtype=float)

    return metric(
        "needle", f"n{n}_r{r}", "higher", name,
        id=f"needle_n{n}_r{r}", unit="accuracy", scores=scores, margin=0.05 if single else 0.0,
        claim="One needle is found as well (within 0.05)" if single else f"{name}: more of them found",
        paper=paper.needles((n, r)), source="Table 2",
        untested=_finds_few if single else None,
    )  # fmt: skip


def final_loss(better: str = "lower") -> Quantity:
    """The last validation loss of training, nats a token."""
    return Quantity(
        "validation loss", lambda record: record.final_loss, better, id="validation_loss", unit="nats a token",
        source="Figure 3",
    )  # fmt: skip


def _outlier(kind: str, what: str) -> list[Quantity]:
    top, median = f"{kind}_top1", f"{kind}_median"
    largest, in_medians = paper.outliers(kind)
    return [
        metric("outliers", top, "lower", f"largest {what}", id=kind, unit="magnitude", scores=_column(top),
               reduce=np.max, largest=True, claim=f"Smaller largest {what}", paper=largest, source="Table 5"),
        metric("outliers", top, "lower", f"largest {what}, in medians", over=median, id=f"{kind}_in_medians",
               unit="medians", scores=_columns(top, median), reduce=_in_medians, largest=True,
               claim=f"Smaller largest {what} beside the median", paper=in_medians,
               source="Table 5"),
    ]  # fmt: skip


def _slice(key: str, name: str, **more) -> Quantity:
    columns = _columns(f"{key}_sum", f"{key}_count")
    return metric("associative_recall", key, "lower", name, id=key, unit="nats a token", scores=columns,
                  reduce=_ratio_of_sums, **more)  # fmt: skip


def _many_shot(id: str, key: str, better: str, name: str, unit: str, order: str, **more) -> Quantity:
    return metric("many_shot", key, better, name, id=id, unit=unit, scores=_orders(order), **more)


_REGISTERED = [
    metric("associative_recall", "validation", "lower", "loss", id="loss", unit="nats a token", scores=_column("loss"),
           claim="Lower language-modelling loss", paper=paper.loss("validation"), source="Table 6, Figure 3"),
    metric("recall", "accuracy", "higher", "accuracy at the end", id="recall", unit="accuracy", scores=_recalled,
           claim="More values recalled from noise", paper=paper.needles((0, 0)).replace("(6, 2)", "needles (6, 2)"),
           source="Section 3.4", ours=True),
    _slice("ar_hit", "loss on AR-Hit", claim="Lower loss where the context can be recalled",
           paper=paper.loss("ar_hit"), source="Table 6, AR-Hit", untested=_recalls_little),
    _slice("others", "loss on Others", claim="Lower loss on all other tokens", paper=paper.loss("others"),
           source="Table 6, Others"),
    *(needle(n, r) for n, r in ((1, 1), (2, 1), (4, 1), (4, 2))),
    metric("allocation", "answer", "higher", "attention on the answer", id="answer", unit="share",
           scores=_column("answer"), claim="More attention on the answer", paper=paper.allocation("answer"),
           source="Table 3"),
    metric("allocation", "noise", "lower", "attention on the noise", id="noise", unit="share",
           scores=_column("noise"), claim="Less attention on the noise", paper=paper.allocation("noise"),
           source="Table 3"),
    metric("allocation", "best_head_answer", "", "attention on the answer in the best head of all",
           id="best_head_answer", unit="share"),
    *_outlier("logits", "attention logit"),
    *_outlier("hidden", "hidden value"),
    metric("throughput", "train_tokens_per_second", "higher", "tokens/s, training", id="throughput", unit="tokens/s",
           scores=_column("train_tokens_per_second"), reduce=np.median, margin=0.12, relative=True,
           claim="Training costs at most 12 % of the throughput", paper=paper.throughput(),
           source="Table 7"),
    metric("throughput", "forward_tokens_per_second", "", "tokens/s, forward", id="throughput_forward",
           unit="tokens/s", scores=_column("forward_tokens_per_second"), reduce=np.median, relative=True,
           source="Table 7"),
    Quantity("loss over the whole length", lambda record: None, "lower", id="long_nll", experiment="long_nll",
             unit="nats a token", scores=_whole_length, claim="Lower loss over the whole length of a document",
             paper="a figure: DIFF lower throughout", source="Figure 4"),
    metric("long_nll", "nll128", "lower", "loss over 128 tokens (the length trained at)", id="nll128",
           unit="nats a token", source="Figure 4"),
    metric("long_nll", "nll256", "", "loss over 256 tokens (extrapolation)", id="nll256", unit="nats a token"),
    metric("long_nll", "nll512", "", "loss over 512 tokens (extrapolation)", id="nll512", unit="nats a token"),
    metric("quantization", "loss_4bit_change", "lower", "loss that 4-bit logits cost", id="four_bits",
           unit="nats a token", scores=_cost_of_four_bits, claim="Attention logits of 4 bits cost less",
           paper="a figure: 4-bit DIFF as good as 6-bit Transformer", source="Figure 8"),
    metric("quantization", "loss_6bit_change", "lower", "loss that 6-bit logits cost", id="six_bits",
           unit="nats a token", source="Figure 8"),
    metric("quantization", "accuracy_4bit", "higher", "accuracy at 4 bits (chance .25)", id="accuracy_4bit",
           unit="accuracy", source="Figure 8"),
    _many_shot("many_shot", "random_mean", "higher", "many-shot accuracy (chance .06)", "accuracy", "random",
               claim="More right answers from many examples", paper=paper.shots(),
               source="Figure 6"),
    _many_shot("order_random", "random_margin", "lower", "many-shot best less worst order", "best less worst",
               "random", reduce=_margin, claim="Less depends on the order of the examples (drawn at random)",
               paper=paper.order("random"), source="Figure 7"),
    _many_shot("order_alternate", "alternate_margin", "lower", "many-shot best less worst order by class",
               "best less worst", "alternate", reduce=_margin,
               claim="Less depends on the order of the examples (classes in turn)",
               paper=paper.order("alternate"), source="Figure 7"),
    metric("hallucination", "mean", "higher", "outputs free of hallucination", id="hallucination", unit="accuracy",
           scores=_column("score"), reduce=_mean_of_decided, claim="More outputs free of hallucination",
           paper=paper.hallucination(), source="Table 4"),
    final_loss(),
    metric("gradients", "median", "", "median gradient norm", id="gradient_median"),
    metric("gradients", "largest", "", "largest gradient norm after the first tenth", id="gradient_largest"),
    metric("gradients", "spikes", "", "gradient spikes", id="gradient_spikes"),
    metric("model", "parameters", "", "parameters", id="parameters", kind="computed"),
    metric("model", "flops_per_token", "", "FLOPs a token", id="flops_per_token", kind="computed"),
    metric("model", "kv_bytes_per_token", "", "cache a token", id="kv_bytes_per_token", unit="B", kind="computed"),
    metric("model", "intermediate_size", "", "feed-forward width", id="intermediate_size", kind="computed"),
]  # fmt: skip
QUANTITIES: dict[str, Quantity] = {quantity.id: quantity for quantity in _REGISTERED}


def quantities(*ids: str) -> tuple[Quantity, ...]:
    """Those of the registry with these ids."""
    return tuple(QUANTITIES[id] for id in ids)


def paper_claims(cells: Sequence[tuple[int, int]]) -> list[Quantity]:
    """Every claim that ``compare`` tests, ours too; ``cells`` are the (N, R) of the needle evaluation."""
    made = []
    for quantity in _REGISTERED:
        if quantity.experiment != "needle":
            made += [quantity] if quantity.claim else []
        elif quantity.id == "needle_n1_r1":  # the first: here stand those of the evaluation
            made += [needle(n, r) for n, r in cells]
    return made
