"""The registry of quantities: what is measured on a model, its unit, how the paper says it differs, and how that is
tested. Claims, tables, figures and pages read it.

A quantity is a function of rows: ``of`` gives one row an example, ``reduce`` goes from scores to a model's number. All
functions here take the rows of one setting.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

import diff_transformer.lab.paper as paper
from diff_transformer.lab.per_example import (
    cost_of_bits,
    importance_gini,
    last_step,
    late_loss,
    loss_up_to,
    many_orders,
    mean_of,
    orders,
    over_layers,
    steps_to_goal,
    times_the_length,
    where,
    whole_length,
)
from diff_transformer.lab.rows import KEYS, TABLES, UNIT, Rows
from diff_transformer.lab.stats import Average, Pairs, Reduce, average

if TYPE_CHECKING:
    import pandas as pd


# ---- from scores [..., examples, columns] to numbers [...]


def mean(scores: np.ndarray) -> np.ndarray:
    return scores[..., 0].mean(-1)


def median(scores: np.ndarray) -> np.ndarray:
    return np.median(scores[..., 0], -1)


def ratio_of_sums(scores: np.ndarray) -> np.ndarray:
    sums = scores.sum(-2)
    with np.errstate(divide="ignore", invalid="ignore"):
        return sums[..., 0] / sums[..., 1]


def largest(scores: np.ndarray) -> np.ndarray:
    return scores[..., 0].max(-1)


def largest_in_medians(scores: np.ndarray) -> np.ndarray:
    """The largest value of all texts over the median of their medians, from columns (largest, median)."""
    return scores[..., 0].max(-1) / np.median(scores[..., 1], -1)


def best_minus_worst(scores: np.ndarray) -> np.ndarray:
    """The range of the accuracies of the columns."""
    return np.ptp(scores.mean(-2), axis=-1)


@dataclass(frozen=True)
class Quantity:
    """A number of a model.

    Attributes:
        id: its key in the registry.
        name: what tables call it.
        unit: of the number.
        better: how DIFF should differ according to the paper, "lower" or "higher"; "" where the paper says nothing.
        experiment, columns: its scores; without columns, all that ``of`` adds.
        of: from the rows of the experiment to one row an example, where a row is no example.
        reduce: from scores to the model's number.
        claim: the paper's statement; "" for what only stands in tables.
        paper: the paper's numbers, Transformer / DIFF; a dagger marks a third party's transcription.
        source: tables and figures of the paper.
        figure: the page's figure that shows it.
        margin: how far on the wrong side of zero the difference may lie while the claim still holds.
        relative: compare by DIFF / Transformer - 1 instead of DIFF - Transformer.
        untested: why the rows of a baseline cannot test the claim; "" where they can.
        ours: the paper does not make the claim; it stands apart and never counts among the paper's.
        ends: columns with the ends of its interval, where the experiment gives one.
    """

    id: str
    name: str
    unit: str
    better: str
    experiment: str
    columns: tuple[str, ...]
    of: "Callable[[pd.DataFrame], pd.DataFrame] | None" = field(default=None, repr=False)
    reduce: Reduce = mean
    claim: str = ""
    paper: str = ""
    source: str = ""
    figure: str = ""
    margin: float = 0.0
    relative: bool = False
    untested: Callable[[Rows, str], str] | None = None
    ours: bool = False
    ends: tuple[str, str] | None = None

    @property
    def threshold(self) -> float:
        """The difference at which the claim stops to hold."""
        return self.margin if self.better == "lower" else -self.margin

    @property
    def bootstrap(self) -> bool:
        """False for a largest value, whose bootstrap interval covers too seldom."""
        return self.reduce not in (largest, largest_in_medians)

    def examples(self, rows: Rows) -> "tuple[pd.DataFrame, list[str]]":
        """One row an example, and the columns of its scores; examples without a finite score are left out."""
        frame = rows[self.experiment]
        frame = self.of(frame) if self.of and len(frame) else frame
        columns = list(self.columns) or [name for name in frame if name not in UNIT]
        frame = frame.reindex(columns=[*UNIT, *columns]).replace([np.inf, -np.inf], np.nan)
        return frame.dropna(subset=columns), columns

    def values(self, rows: Rows, side: str) -> dict[int, float]:
        """Its number by training seed."""
        frame, columns = self.examples(rows)
        by_seed = frame[frame["side"] == side].groupby("seed")[columns]
        means = {int(seed): float(self.reduce(of.to_numpy(float))) for seed, of in by_seed}
        return {seed: value for seed, value in means.items() if np.isfinite(value)}

    def average(self, rows: Rows, side: str) -> Average:
        """Its number of one side, with an interval: over examples where it is a mean of scores, else over seeds."""
        if self.ends:
            frame = rows[self.experiment]
            frame = self.of(frame) if self.of else frame
            numbers = frame[frame["side"] == side].reindex(columns=[*self.columns, *self.ends])
            numbers = numbers.dropna(subset=[*self.columns]).to_numpy(float)
            return Average(*numbers[0], 1, 1) if len(numbers) else average([])
        if self.reduce is mean:
            frame, (column,) = self.examples(rows)
            by_seed = [of.to_numpy(float) for _, of in frame[frame["side"] == side].groupby("seed")[column]]
            return average(by_seed, proportion=self.unit == "accuracy")
        numbers = [*self.values(rows, side).values()]
        of_seeds = average([np.array([value]) for value in numbers])
        known = len(numbers) > 2
        low, high = (of_seeds.low, of_seeds.high) if known else (np.nan, np.nan)
        frame, _ = self.examples(rows)
        return Average(of_seeds.mean, low, high, int((frame["side"] == side).sum()), len(numbers))

    def pairs(self, rows: Rows, ours: str, other: str) -> Pairs:
        """The scores of examples that both sides have, in the same order, of each training seed that both have."""
        frame, columns = self.examples(rows)
        key = ["seed", "data_seed", "example"]
        a, b = (frame[frame["side"] == side] for side in (ours, other))
        both = a.merge(b, on=key, suffixes=("", "_other"), validate="one_to_one")
        shared = both.groupby(key[1:])["seed"].transform("nunique") == both["seed"].nunique()
        both = both[shared] if shared.any() else both  # examples that all seeds have, in one order
        rank = {
            example: place for place, example in enumerate(dict.fromkeys(zip(*(both[k] for k in key[1:]), strict=True)))
        }
        order = [rank[example] for example in zip(*(both[k] for k in key[1:]), strict=True)]
        both = both.assign(rank=order).sort_values("rank", kind="stable")
        others = [f"{column}_other" for column in columns]
        return {
            int(seed): (of[columns].to_numpy(float), of[others].to_numpy(float)) for seed, of in both.groupby("seed")
        }


# ---- what a Transformer cannot test


def _recalls_little(rows: Rows, side: str) -> str:
    """Its loss is not lower where the context can be recalled, as the paper's models' is (.898, 3.272)."""
    hit, others = (np.mean([*QUANTITIES[name].values(rows, side).values()]) for name in ("ar_hit", "others"))
    if hit <= others:
        return ""
    return f"the Transformer does not recall there: its loss elsewhere is lower, {others:.3f} (the paper: higher)"


def _finds_few(rows: Rows, side: str) -> str:
    accuracies = [*needle(1, 1).values(rows, side).values()]
    return "the Transformer itself finds fewer than half" if accuracies and np.mean(accuracies) < 0.5 else ""


# ---- the registry


def needle(n: int, r: int) -> Quantity:
    """The accuracy of ``r`` of ``n`` needles."""
    name = "1 needle" if n == 1 else f"{n} needles, {r} asked for"
    return Quantity(
        f"needle_n{n}_r{r}", name, "accuracy", "higher", "needle", ("score",), of=where(n=n, r=r),
        claim="One needle is found as well (within 0.05)" if n == 1 else f"{name}: more of them found",
        paper=paper.needles((n, r)), source="Table 2", figure="needles", margin=0.05 if n == 1 else 0.0,
        untested=_finds_few if n == 1 else None,
    )  # fmt: skip


def _loss(id: str, name: str, columns: tuple[str, ...], claim: str, part: str, **more) -> Quantity:
    return Quantity(
        id, name, "nats a token", "lower", "associative_recall", columns, claim=claim, paper=paper.loss(part),
        source="Table 6", figure="slices", **more,
    )  # fmt: skip


def _outlier(kind: str, name: str) -> list[Quantity]:
    top, medians = paper.outliers(kind)
    first, second = f"{kind}_top1", f"{kind}_median"
    return [
        Quantity(kind, f"largest {name}", "magnitude", "lower", "outliers", (first,), reduce=largest,
                 claim=f"Smaller largest {name}", paper=top, source="Table 5", figure="outliers"),
        Quantity(f"{kind}_in_medians", f"largest {name}, in medians", "medians", "lower", "outliers", (first, second),
                 reduce=largest_in_medians, claim=f"Smaller largest {name} beside the median", paper=medians,
                 source="Table 5", figure="outliers"),
    ]  # fmt: skip


def _of_model(id: str, name: str, unit: str = "") -> Quantity:
    return Quantity(id, name, unit, "", "model", (id,))


def _order(kind: str, words: str) -> Quantity:
    return Quantity(
        f"order_{kind}", f"best minus worst order ({words})", "best minus worst", "lower", "many_shot", (),
        of=orders(kind), reduce=best_minus_worst, claim=f"Less depends on the order of the examples ({words})",
        paper=paper.order(kind), source="Figure 7", figure="many_shot",
    )  # fmt: skip


_NEEDLES = "needle_n1_r1"  # its place in the registry is that of all cells
_REGISTERED = [
    _loss("loss", "loss", ("loss",), "Lower language-modelling loss", "validation"),
    Quantity("recall", "accuracy of key-value recall", "accuracy", "higher", "recall", ("share",),
             of=times_the_length(1), claim="More values recalled from noise",
             paper=paper.needles((0, 0)).replace("(6, 2)", "needles (6, 2)"),
             source="Section 3.4", figure="recall", ours=True),
    _loss("ar_hit", "loss on AR-Hit", ("ar_hit_sum", "ar_hit_count"), "Lower loss where the context can be recalled",
          "ar_hit", reduce=ratio_of_sums, untested=_recalls_little),
    _loss("others", "loss on Others", ("others_sum", "others_count"), "Lower loss on all other tokens", "others",
          reduce=ratio_of_sums),
    *(needle(n, r) for n, r in ((1, 1), (2, 1), (4, 1), (4, 2))),
    Quantity("answer", "attention on the answer", "share", "higher", "allocation", ("answer",),
             claim="More attention on the answer", paper=paper.allocation("answer"), source="Table 3",
             figure="allocation"),
    Quantity("noise", "attention on the noise", "share", "lower", "allocation", ("noise",),
             claim="Less attention on the noise", paper=paper.allocation("noise"), source="Table 3",
             figure="allocation"),
    *_outlier("logits", "attention logit"),
    *_outlier("hidden", "hidden value"),
    Quantity("throughput", "training", "tokens/s", "higher", "throughput", ("train_tokens_per_second",), reduce=median,
             claim="Training costs at most 12 % of the throughput", paper=paper.throughput(), source="Table 7",
             figure="throughput", margin=0.12, relative=True),
    Quantity("throughput_forward", "forward", "tokens/s", "", "throughput", ("forward_tokens_per_second",),
             reduce=median, relative=True),
    Quantity("long_nll", "loss over the whole length", "nats a token", "lower", "long_nll", ("loss",),
             of=whole_length, claim="Lower loss over the whole length of a document",
             paper="a figure: DIFF lower throughout", source="Figure 4", figure="long_nll"),
    *(Quantity(f"nll{n}", f"loss over {n} tokens", "nats a token", "lower", "long_nll", ("loss",), of=loss_up_to(n))
      for n in (128, 256, 512)),
    Quantity("four_bits", "loss that 4-bit logits cost", "nats a token", "lower", "quantization", ("cost",),
             of=cost_of_bits(4, "loss"), claim="Attention logits of 4 bits cost less",
             paper="a figure: 4-bit DIFF as good as 6-bit Transformer", source="Figure 8", figure="quantization"),
    Quantity("six_bits", "loss that 6-bit logits cost", "nats a token", "lower", "quantization", ("cost",),
             of=cost_of_bits(6, "loss")),
    Quantity("many_shot", "many-shot accuracy", "accuracy", "higher", "many_shot", ("score",), of=many_orders,
             claim="More right answers from many examples", paper=paper.shots(), source="Figure 6",
             figure="many_shot"),
    _order("random", "drawn at random"),
    _order("alternate", "classes in turn"),
    Quantity("hallucination", "outputs free of hallucination", "accuracy", "higher", "hallucination", ("score",),
             claim="More outputs free of hallucination", paper=paper.hallucination(), source="Table 4",
             figure="hallucination"),
    Quantity("validation_loss", "validation loss", "nats a token", "lower", "validation", ("loss",), of=last_step,
             source="Figure 3", figure="losses"),
    *(Quantity(f"{name}_loss", f"training loss on {name}", "nats a token", "lower", "sources", ("loss",),
               of=late_loss(name)) for name in ("text", "needles")),
    Quantity("objective", "objective", "nats a token", "lower", "sources", ("loss",), of=late_loss("text", "needles")),
    Quantity("steps_to_goal", "steps to 0.9, log2", "log2 of steps", "lower", "recall_curve", ("log2",),
             of=steps_to_goal),
    *(Quantity(f"recall_{n}x", f"recall at {n} times the length", "accuracy", "higher", "recall", ("share",),
               of=times_the_length(n)) for n in (2, 4)),
    Quantity("recall_first_question", "accuracy on the first question", "accuracy", "higher", "recall_first",
             ("right",)),
    Quantity("recall_answer", "attention on the value asked for", "", "higher", "recall_first", ("answer",)),
    Quantity("recall_noise", "attention on the noise of recall", "", "lower", "recall_first", ("noise",)),
    *(Quantity(f"gradient_{key}", f"{words} gradient norm", "", "", "gradients", (key,))
      for key, words in (("median", "median"), ("largest", "largest"))),
    Quantity("gradient_spikes", "gradient spikes", "", "", "gradients", ("spikes",)),
    *(Quantity(f"anatomy_{column}", words, unit, "", "anatomy", (column,), of=mean_of(column))
      for column, words, unit in (
          ("negative_mass", "negative attention", "share"), ("sink", "attention on the first token", "share"),
          ("keys", "effective keys of a head", ""), ("distance", "distance of heads' maps", ""),
          ("cka", "CKA of heads' outputs", ""))),
    Quantity("anatomy_gini", "Gini index of heads' importance", "", "", "anatomy", ("importance",),
             of=importance_gini),
    *(Quantity(f"hessian_{end}", f"{end} eigenvalue of the Hessian", "", "", "hessian", ("value",), of=where(rank=rank))
      for end, rank in (("largest", 1), ("smallest", -1))),
    _of_model("parameters", "parameters"),
    _of_model("flops_per_token", "FLOPs a token"),
    _of_model("kv_bytes_per_token", "cache a token", "B"),
    _of_model("intermediate_size", "feed-forward width"),
]  # fmt: skip
QUANTITIES: dict[str, Quantity] = {quantity.id: quantity for quantity in _REGISTERED}
OF_TABLES = (  # what tables of a study show
    "loss", "validation_loss", "ar_hit", "others", "needle_n1_r1", "needle_n2_r1", "needle_n4_r1", "needle_n4_r2",
    "nll128", "nll512", "answer", "noise", "logits", "logits_in_medians", "hidden", "hidden_in_medians",
    "four_bits", "many_shot", "order_random", "recall", "steps_to_goal", "long_nll", "hallucination",
    "gradient_median", "gradient_largest", "gradient_spikes",
)  # fmt: skip


def numbers_of(experiment: str, rows: Rows) -> list[str]:
    """The columns of numbers of an experiment that is not one of this package."""
    frame = rows[experiment]
    return [name for name in frame.select_dtypes(["number", "bool"]) if name not in KEYS and frame[name].notna().any()]


def further(rows: Rows) -> list[Quantity]:
    """Quantities whose tasks, sets or columns only the rows say: of harness, RULER, quantisation, hallucination,
    gradient flow and scaling, and of experiments that are not of this package."""
    quantities = [
        Quantity(f"harness_{task}_{shots:.0f}", f"{task}, {shots:.0f} shots", "accuracy", "", "harness", ("score",),
                 of=where(task=task, shots=shots))
        for task, shots in rows["harness"][["task", "shots"]].drop_duplicates().itertuples(index=False)
    ]  # fmt: skip
    quantities += [
        Quantity(f"ruler_{task}_{length:.0f}", f"RULER {task}, {length:.0f} tokens", "accuracy", "", "ruler",
                 ("score",), of=where(task=task, length=length))
        for task, length in rows["ruler"][["task", "length"]].drop_duplicates().itertuples(index=False)
    ]  # fmt: skip
    quantities += [
        Quantity(f"choices_{bits:.0f}_bits", f"right choices, {bits:.0f}-bit logits", "accuracy", "",
                 "quantization_choice", ("score",), of=where(bits=bits))
        for bits in rows["quantization_choice"]["bits"].unique()
    ]  # fmt: skip
    quantities += [
        Quantity(f"hallucination_{name}", f"free of hallucination, {name}", "accuracy", "", "hallucination",
                 ("score",), of=where(set=name))
        for name in rows["hallucination"]["set"].unique()
    ]  # fmt: skip
    quantities += [
        Quantity(f"gradient_{state}_{part}", f"gradient of {part} ({state})", "root mean square", "", "gradient_flow",
                 ("rms",), of=over_layers(state, part))
        for state, part in rows["gradient_flow"][["state", "part"]].drop_duplicates().itertuples(index=False)
    ]  # fmt: skip
    quantities += [
        Quantity(f"scaling_{fit}_{column}", words.format(fit), "", "", "scaling", (column,), of=where(fit=fit),
                 ends=(f"{column}_low", f"{column}_high"))
        for fit in rows["scaling"]["fit"].unique()
        for column, words in (("exponent", "exponent of loss against {}"), ("ratio", "{} for equal loss, ratio"))
        if column in rows["scaling"]
    ]  # fmt: skip
    others = [name for name in rows.experiments if name not in TABLES]
    quantities += [
        Quantity(f"{name}_{column}", f"{name} {column}".replace("_", " "), "", "", name, (column,), of=mean_of(column))
        for name in others
        for column in numbers_of(name, rows)
    ]
    return quantities


def registered(rows: Rows) -> list[Quantity]:
    """Every quantity of the registry, with the cells of needles that were evaluated, and ``further`` ones."""
    cells = rows["needle"][["n", "r"]].drop_duplicates().sort_values(["n", "r"]).itertuples(index=False)
    needles = [needle(int(n), int(r)) for n, r in cells]
    quantities: list[Quantity] = []
    for quantity in _REGISTERED:
        if quantity.experiment != "needle":
            quantities.append(quantity)
        elif quantity.id == _NEEDLES:
            quantities += needles
    return quantities + further(rows)
