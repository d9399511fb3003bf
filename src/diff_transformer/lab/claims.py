"""The paper's claims, each with the number that tests it here, judged over the records of the pair.

With three seeds or more, the interval is over seeds and evaluation examples. With fewer, it is a paired bootstrap over
the examples, which covers *these* trained models; another seed may give another result. A largest value has none then:
its bootstrap covers too seldom. With three seeds or more a claim has the p-value of its test, from which the page says
what Holm's correction keeps; if they leave it undecided, it has the number of seeds that would decide it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from diff_transformer.lab.record import PAIR, Record
from diff_transformer.lab.stats import (
    MOST_SEEDS,
    SEEDS_FOR_AN_INTERVAL,
    Interval,
    OverExamples,
    mean,
    over_examples,
    over_seeds_and_examples,
    paired_p_value,
    seeds_to_decide,
    verdict,
)
from diff_transformer.model.matching import LABELS

CONTROL = "softmax_norm"  # the Transformer with DIFF's head norm: what the norm gives without the subtraction
Rows = list[dict]  # of one experiment, as a record has them
Scores = Callable[[Rows], np.ndarray]  # for each example, the values of its score: [examples, ...]


def _testable(rows: Rows) -> str:
    return ""


@dataclass(frozen=True)
class Claim:
    """A claim, of the paper if not ``ours``, and how it is tested.

    Attributes:
        paper: the paper's numbers, Transformer / DIFF; a dagger marks a third party's transcription.
        eval: the experiment whose rows are read.
        scores: reads the score of each example from the rows.
        better: how DIFF should differ, "lower" or "higher".
        reduce: from scores to a model's number.
        largest: whether ``reduce`` takes a largest value, which has no bootstrap interval.
        margin: how far on the wrong side of zero the difference may lie while the claim still holds.
        relative: judge DIFF / Transformer - 1 instead of DIFF - Transformer.
        untested: why a Transformer with these rows cannot test the claim; "" where it can.
        ours: the paper does not make the claim; it stands apart and never counts among the paper's.
    """

    id: str
    claim: str
    paper: str
    source: str
    eval: str
    scores: Scores
    better: str
    unit: str = ""
    reduce: Callable[[np.ndarray], float] = mean
    largest: bool = False
    margin: float = 0.0
    relative: bool = False
    untested: Callable[[Rows], str] = _testable
    ours: bool = False

    def value(self, record: Record) -> float:
        """The model's number; NaN if no example counts."""
        scores = self.scores(record.rows[self.eval])
        return float(self.reduce(scores)) if scores.size else math.nan


def _column(name: str) -> Scores:
    return lambda rows: np.array([row[name] for row in rows], dtype=float)


def _slice(name: str) -> Scores:
    return lambda rows: np.array([[row[f"{name}_sum"], row[f"{name}_count"]] for row in rows], dtype=float)


def _ratio_of_sums(values: np.ndarray) -> float:
    sums = values.sum(0)
    return float(sums[0] / sums[1]) if sums[1] else math.nan


def _finds_few(rows: Rows) -> str:
    scores = [row["score"] for row in rows if (row["needles"], row["queries"]) == (1, 1)]
    return "" if np.mean(scores) >= 0.5 else "the Transformer itself finds fewer than half"


def _recalls_little(rows: Rows) -> str:
    hit, others = (_ratio_of_sums(_slice(name)(rows)) for name in ("ar_hit", "others"))
    if hit <= others:
        return ""
    return f"the Transformer does not recall there: its loss elsewhere is lower, {others:.3f} (the paper: higher)"


def _in_medians(values: np.ndarray) -> float:
    """The largest value of all texts divided by the median over texts, from rows of (largest, median)."""
    return float(values[:, 0].max() / np.median(values[:, 1]))


def _largest_and_median(kind: str) -> Scores:
    names = f"{kind}_top1", f"{kind}_median"
    return lambda rows: np.array([[row[name] for name in names] for row in rows], dtype=float)


def _needle_claims(cells: Sequence[tuple[int, int]]) -> list[Claim]:
    paper = {(1, 1): "1.00 / 1.00", (2, 2): "0.85 / 0.92", (4, 2): "0.62 / 0.84", (6, 2): "0.55 / 0.85"}
    claims = []
    for n, r in cells:
        single = n == 1
        claims.append(Claim(
            id=f"needle_n{n}_r{r}",
            claim="One needle is found as well (within 0.05)" if single
            else f"{n} needles, {r} asked for: more of them found",
            paper=f"{paper.get((n, r), 'not reported; (6, 2): 0.55 / 0.85')} † (4K, 3B)",
            source="Table 2", eval="needle",
            scores=lambda rows, n=n, r=r: np.array(
                [row["score"] for row in rows if (row["needles"], row["queries"]) == (n, r)], dtype=float),
            better="higher", unit="accuracy", margin=0.05 if single else 0.0,
            untested=_finds_few if single else _testable,
        ))  # fmt: skip
    return claims


def _last_average(rows: Rows) -> np.ndarray:
    """For each book, the mean loss over the whole length: [books]."""
    return np.array([sum(row["sums"]) / sum(row["counts"]) for row in rows])


def _cost_of_four_bits(rows: Rows) -> np.ndarray:
    """For each row of text, its loss with 4-bit logits minus its loss with the most bits."""
    losses: dict[int, dict[int, float]] = {}
    for row in rows:
        if "loss" in row:
            losses.setdefault(row["bits"], {})[row["row"]] = row["loss"]
    most = losses[max(losses)]
    return np.array([losses[4][row] - most[row] for row in most])


def _orders(rows: Rows, order: str) -> np.ndarray:
    """Score of each question under each order of the examples, at the largest number: [questions, orders]."""
    rows = [row for row in rows if row["order"] == order]
    largest = max((row["shots"] for row in rows), default=0)
    by_seed: dict[int, list[float]] = {}
    for row in rows:
        if row["shots"] == largest:
            by_seed.setdefault(row["order_seed"], []).append(row["score"])
    return np.array(list(by_seed.values())).T


def _recalled(rows: Rows) -> np.ndarray:
    """For each row of the trained length, the share of its questions that is answered right."""
    shortest = min(rows, key=lambda row: row["length"])
    return np.array(shortest["hits"]) / shortest["questions"]


def _margin(scores: np.ndarray) -> float:
    """Best minus worst accuracy over the orders."""
    accuracies = scores.mean(0)
    return float(accuracies.max() - accuracies.min())


def _mean_of_decided(scores: np.ndarray) -> float:
    return float(np.nanmean(scores)) if np.isfinite(scores).any() else math.nan


def _more_claims() -> list[Claim]:
    """Claims of the experiments that a recipe may add (``evaluation.more``)."""
    return [
        Claim("long_nll", "Lower loss over the whole length of a document", "a figure: DIFF lower throughout",
              "Figure 4", "long_nll", _last_average, "lower", "nats a token"),
        Claim("four_bits", "Attention logits of 4 bits cost less", "a figure: 4-bit DIFF as good as 6-bit Transformer",
              "Figure 8", "quantization", _cost_of_four_bits, "lower", "nats a token"),
        Claim("many_shot", "More right answers from many examples", "mean gain 5.2 to 21.6 points † (64K)", "Figure 6",
              "many_shot", lambda rows: _orders(rows, "random"), "higher", "accuracy"),
        Claim("order_random", "Less depends on the order of the examples (drawn at random)",
              "19.0 / 4.0 points † (TREC)", "Figure 7", "many_shot", lambda rows: _orders(rows, "random"), "lower",
              "best less worst", _margin),
        Claim("order_alternate", "Less depends on the order of the examples (classes in turn)",
              "56.7 / 13.4 points † (TREC)", "Figure 7", "many_shot", lambda rows: _orders(rows, "alternate"), "lower",
              "best less worst", _margin),
        Claim("hallucination", "More outputs free of hallucination", "0.28 to 0.44 / 0.36 to 0.61 †", "Table 4",
              "hallucination", _column("score"), "higher", "accuracy", _mean_of_decided),
    ]  # fmt: skip


def paper_claims(cells: Sequence[tuple[int, int]]) -> list[Claim]:
    """Every claim that ``compare`` tests, ours too; ``cells`` are the (N, R) of the needle evaluation."""
    return [
        Claim("loss", "Lower language-modelling loss", "3.087 / 3.062 † (1.4B)", "Table 6, Figure 3",
              "associative_recall", _column("loss"), "lower", "nats a token"),
        Claim("recall", "More values recalled from noise", "not reported; needles (6, 2): 0.55 / 0.85 † (4K, 3B)",
              "Section 3.4", "recall", _recalled, "higher", "accuracy", ours=True),
        Claim("ar_hit", "Lower loss where the context can be recalled", "0.898 / 0.880 † (1.4B)", "Table 6, AR-Hit",
              "associative_recall", _slice("ar_hit"), "lower", "nats a token", _ratio_of_sums,
              untested=_recalls_little),
        Claim("others", "Lower loss on all other tokens", "3.272 / 3.247 † (1.4B)", "Table 6, Others",
              "associative_recall", _slice("others"), "lower", "nats a token", _ratio_of_sums),
        *_needle_claims(cells),
        Claim("answer", "More attention on the answer", "0.05 / 0.32 (mean of depths)", "Table 3", "allocation",
              _column("answer"), "higher", "share"),
        Claim("noise", "Less attention on the noise", "0.51 / 0.02 (mean of depths)", "Table 3", "allocation",
              _column("noise"), "lower", "share"),
        Claim("logits", "Smaller largest attention logit", "318.0 / 38.8 †", "Table 5", "outliers",
              _column("logits_top1"), "lower", "magnitude", np.max, largest=True),
        Claim("logits_in_medians", "Smaller largest attention logit beside the median", "59 / 12 † (its quotients)",
              "Table 5", "outliers", _largest_and_median("logits"), "lower", "medians", _in_medians,
              largest=True),
        Claim("hidden", "Smaller largest hidden value", "3608.6 / 1688.2 †", "Table 5", "outliers",
              _column("hidden_top1"), "lower", "magnitude", np.max, largest=True),
        Claim("hidden_in_medians", "Smaller largest hidden value beside the median", "6014 / 1407 † (its quotients)",
              "Table 5", "outliers", _largest_and_median("hidden"), "lower", "medians", _in_medians,
              largest=True),
        Claim("throughput", "Training costs at most 12 % of the throughput", "7247 / 6635 and 7491 / 6718 tokens/s †",
              "Table 7", "throughput", _column("train_tokens_per_second"), "higher", "tokens/s", np.median,
              margin=0.12, relative=True),
        *_more_claims(),
    ]  # fmt: skip


def judge(claims: Sequence[Claim], records: Sequence[Record]) -> list[dict]:
    """Judge each claim whose experiment the records of the pair have, over the seeds that both sides have.

    Where ``records`` has the control with the same seeds, its number and DIFF's difference from it stand beside.

    Returns:
        One dictionary per claim, as the report shows it.
    """
    judged = []
    for claim in claims:
        ours, theirs, control = (
            {r.seed: r for r in records if r.side == side and claim.eval in r.rows} for side in (*PAIR, CONTROL)
        )
        seeds = sorted(ours.keys() & theirs.keys())
        if not seeds:
            continue
        pair = [ours[seed] for seed in seeds], [theirs[seed] for seed in seeds]
        values = np.array([[claim.value(record) for record in side] for side in pair])
        # not known if a slice holds no token, for example
        known = np.array([np.isfinite(of_seed).all() for of_seed in values.T])
        if not known.any():
            continue
        judged.append(_judge_one(claim, pair, values, known, sorted(ours.keys() ^ theirs.keys())))
        if control.keys() >= set(seeds):
            beside = _beside(claim, (pair[0], [control[seed] for seed in seeds]))
            judged[-1] |= {"control": beside} if beside else {}
    return judged


def _beside(claim: Claim, sides: tuple[list[Record], list[Record]]) -> dict | None:
    """DIFF against the control, over all seeds; None if a number is missing."""
    ours, control = ([claim.value(record) for record in side] for side in sides)
    if not np.isfinite([*ours, *control]).all():
        return None
    interval, _ = _difference(claim, sides)
    judged = "undecided" if _untested(claim, sides[1]) else verdict(interval, claim.better, claim.margin)
    return {
        "side": CONTROL, "label": LABELS[CONTROL], "here": _number(float(np.mean(control))), "values": control,
        "verdict": judged, "difference": _interval(interval, claim.relative),
    }  # fmt: skip


def _untested(claim: Claim, baselines: Sequence[Record]) -> str:
    """Why most of the baselines cannot test the claim, or ""."""
    reasons = [reason for record in baselines if (reason := claim.untested(record.rows[claim.eval]))]
    return reasons[0] if len(reasons) > len(baselines) / 2 else ""


def _difference(claim: Claim, sides: Sequence[list[Record]]) -> tuple[Interval, OverExamples]:
    """The paired difference with its interval, and the part of its variance that is over examples.

    The interval is over seeds and examples if there are enough seeds, and over examples if not.
    """
    first, second = ([claim.scores(record.rows[claim.eval]) for record in side] for side in sides)
    if len(first) < SEEDS_FOR_AN_INTERVAL:
        interval = over_examples(first, second, claim.reduce, relative=claim.relative)
        return interval._replace(low=None, high=None) if claim.largest else interval, OverExamples()
    return over_seeds_and_examples(first, second, claim.reduce, relative=claim.relative)


def _interval(interval: Interval, relative: bool) -> dict:
    return {**interval._asdict(), "relative": relative}


def _judge_one(
    claim: Claim, pair: tuple[list[Record], list[Record]], values: np.ndarray, known: np.ndarray, lost: list[int]
) -> dict:
    relative = claim.relative
    ours, theirs = values[:, known].tolist()
    kept = [[record for record, finite in zip(side, known, strict=True) if finite] for side in pair]
    interval, of_examples = _difference(claim, kept)
    a, b = float(np.mean(ours)), float(np.mean(theirs))
    judged = verdict(interval, claim.better, claim.margin)
    untested = _untested(claim, kept[1])
    if lost:  # the remaining seeds are not a fair sample
        untested = f"one side lacks seed{'s' * (len(lost) > 1)} {', '.join(map(str, lost))}"
    if not known.all():
        missing = len(known) - len(ours)
        untested = f"{missing} of {len(known)} seeds {'has' if missing == 1 else 'have'} no example of it"
    power, tested = "", {}
    if not untested and interval.over != "examples":
        differences = [a / b - 1 if relative else a - b for a, b in zip(ours, theirs, strict=True)]
        threshold = -claim.margin if claim.better == "higher" else claim.margin
        power = _power(differences, threshold, of_examples) if judged == "undecided" else ""
        tested = {"p_value": paired_p_value(differences, threshold, of_examples)}
    return {
        "id": claim.id, "claim": claim.claim, "paper": claim.paper, "source": claim.source, "unit": claim.unit,
        "here": f"{_number(b)} / {_number(a)}", "detail": _detail(interval, len(ours), relative),
        "verdict": "undecided" if untested else judged, "untested": untested, "power": power, "diff": ours,
        "softmax": theirs, "better": claim.better, "difference": _interval(interval, relative),
        **tested, **({"ours": True} if claim.ours else {}),
    }  # fmt: skip


def _detail(interval: Interval, seeds: int, relative: bool) -> str:
    scale, unit = (100, " %") if relative else (1, "")
    text = f"difference {_number(interval.mean * scale, sign=True)}{unit}"
    if interval.low is not None and interval.high is not None:
        text += f" [{_number(interval.low * scale, sign=True)}, {_number(interval.high * scale, sign=True)}]"
    runs = "one run" if seeds == 1 else f"{seeds} seeds"
    if interval.low is None:
        return f"{text}, no interval ({runs})"
    over = {"seeds": runs, "examples": f"examples ({runs})", "seeds and examples": f"{runs} and their examples"}
    return f"{text}, 95 % over {over[interval.over]}"


def _power(differences: Sequence[float], threshold: float, of_examples: OverExamples) -> str:
    """How many seeds would decide a claim; "" if the difference is the same with every seed."""
    if max(differences) == min(differences):
        return ""
    needed = seeds_to_decide(differences, threshold, examples=of_examples)
    if needed is None and of_examples.variance and seeds_to_decide(differences, threshold):
        return (
            "no number of seeds would decide it on these examples, with this mean and spread; more examples are needed"
        )
    seeds = needed or f"more than {MOST_SEEDS}"
    return f"with this mean and spread, {seeds} seeds would decide it in half of all cases"


def _number(value: float, sign: bool = False) -> str:
    size = abs(value)
    digits = 0 if size >= 100 else 1 if size >= 10 else 3
    return f"{value:+,.{digits}f}" if sign else f"{value:,.{digits}f}"
