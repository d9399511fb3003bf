"""The figures of the page: each a function from rows of one setting to panels."""

from collections.abc import Callable
from dataclasses import dataclass

import pandas as pd

from diff_transformer.lab.paper import SAID
from diff_transformer.lab.quantities import numbers_of
from diff_transformer.lab.rows import Rows
from diff_transformer.report.charts import Panel, Sides


@dataclass(frozen=True)
class Figure:
    """A figure of the page.

    Attributes:
        id, title: of its section; quantities name the id.
        source: tables and figures of the paper.
        table: the experiment without whose rows there is no figure.
        read: one or two sentences on how to read it.
        panels: from rows and names of the sides to the panels.
    """

    id: str
    title: str
    source: str
    table: str
    read: str
    panels: Callable[[Rows, Sides], list[Panel]]

    @property
    def paper(self) -> str:
        """The paper's result; "" where it has none."""
        return SAID.get(self.table, SAID.get(self.id, "")) if self.source else ""


FIGURES: list[Figure] = []


def figure(id: str, title: str, source: str, table: str, read: str) -> Callable:
    """Register the function below as a figure of the page, in this order."""
    return lambda panels: FIGURES.append(Figure(id, title, source, table, read, panels)) or panels


def gap(title: str, frame: pd.DataFrame, y: str, x: str, sides: Sides) -> list[Panel]:
    """``y`` of the first side minus that of each other, at the same seed and ``x``; no panel with one side."""
    ours, name = next(iter(sides.items()))
    first = frame["side"] == ours
    both = frame[first].merge(frame[~first], on=["seed", x], suffixes=("_ours", ""))
    both = both.assign(**{y: both[f"{y}_ours"] - both[y]})
    return [Panel(f"{title}: {name} minus the others", both, y, x, "curve", True)] if len(both) else []


@figure("losses", "Loss over training", "Figure 3", "validation",
        "Nats a token: lower is better. A thin line is a seed, the thick one their mean.")  # fmt: skip
def losses(rows: Rows, sides: Sides) -> list[Panel]:
    train, held_out = rows["training"], rows["validation"]
    late = train[train["step"] > 0.06 * train["step"].max()]["loss"].dropna()
    domain = (held_out["loss"].min() * 0.98, held_out["loss"].quantile(0.85))
    panels = [Panel("Validation loss", held_out, "loss", "step", "curve", True, domain=domain)]
    if len(late):
        panels.insert(0, Panel("Training loss", train, "loss", "step", "curve", domain=(late.min(), late.max())))
    return [*panels, *gap("Validation loss", held_out[held_out["step"] > 0], "loss", "step", sides)]


@figure("slices", "Loss on repeated and on new text", "Table 6", "associative_recall",
        "AR-Hit tokens end an n-gram that occurred earlier in the same context, so a model can recall them; all other "
        "tokens must be predicted.")  # fmt: skip
def slices(rows: Rows, sides: Sides) -> list[Panel]:
    frame = rows["associative_recall"]
    sums = frame.groupby(["side", "seed"], as_index=False, sort=False).sum(numeric_only=True)
    parts = [frame.assign(slice="all tokens", nats=frame["loss"])]
    for part, name in (("ar_hit", "AR-Hit"), ("others", "others")):
        parts.append(sums.assign(slice=name, nats=sums[f"{part}_sum"] / sums[f"{part}_count"]))
    every = pd.concat(parts)
    models = frame.assign(model=frame["side"].map(sides))
    panels = [Panel("Loss by slice, mean over tokens", every, "nats", "slice")]
    return [*panels, Panel("Loss of every model", models, "loss", "model")] if len(sides) > 2 else panels


@figure("recall", "Key-value recall in noise", "Section 3.4", "recall",
        "Pairs of key and value among noise, then a key whose value is asked for; rows of one, two and four times the "
        "length. In a comparison, small models are trained on it alone.")  # fmt: skip
def recall(rows: Rows, sides: Sides) -> list[Panel]:
    frame, curve = rows["recall"].assign(share=lambda of: of["hits"] / of["questions"]), rows["recall_curve"]
    panels = [Panel("Accuracy over training", curve, "accuracy", "step", "curve")] if len(curve) else []
    return [*panels, Panel("Accuracy at the end, by length", frame, "share", "length")]


@figure("needles", "Multi-needle retrieval", "Table 2, Figure 5", "needle",
        "Each document hides N needles (a city and its number) and asks for R of them. Depth is the place of the first "
        "needle asked for: 0 % is the start of the document.")  # fmt: skip
def needles(rows: Rows, sides: Sides) -> list[Panel]:
    frame = rows["needle"]
    asked = [f"{r:.0f} of {n:.0f}" for n, r in zip(frame["n"], frame["r"], strict=True)]
    depth = frame["depth"].map(lambda value: "" if pd.isna(value) else f"{value:.0%}")
    frame = frame.assign(asked=asked, depth=depth)
    panels = [Panel("Accuracy", frame, "score", "asked")]
    if frame["depth"].nunique() > 1:
        panels += [
            Panel(f"{cell}, by depth", of, "score", "depth", joined=True)
            for cell, of in frame.groupby("asked", sort=False)
        ]
    if frame["length"].nunique() > 1:
        panels += [
            Panel(f"{cell}, by length", of, "score", "length", joined=True)
            for cell, of in frame.groupby("asked", sort=False)
        ]
    return panels


@figure("allocation", "Where attention goes", "Table 3", "allocation",
        "Of the last position of a retrieval prompt: each head's weights (of DIFF those of A₁ − λ A₂) over the sum of "
        "their magnitudes. Noise is the other text, without the first token and the question.")  # fmt: skip
def allocation(rows: Rows, sides: Sides) -> list[Panel]:
    texts = rows["allocation"].assign(depth=lambda of: of["depth"].map("{:.0%}".format))
    panels = [
        Panel(f"Share of the {part}, by depth", texts, part, "depth", joined=True) for part in ("answer", "noise")
    ]
    heads = rows["allocation_heads"]
    if len(heads):
        key = ["side", "seed", "data_seed", "example", "layer"]
        layers = heads.groupby(key, as_index=False)[["answer", "noise"]].mean()
        panels += [
            Panel(f"Share of the {part}, by layer", layers, part, "layer", joined=True) for part in ("answer", "noise")
        ]
    return panels


@figure("long_nll", "Does a longer context keep helping?", "Figure 4", "long_nll",
        "Mean loss over the first tokens of long documents, by how many. Below the trained length it should fall; "
        "beyond it, a model extrapolates.")  # fmt: skip
def long_nll(rows: Rows, sides: Sides) -> list[Panel]:
    sums = rows["long_nll"].groupby(["side", "seed", "end"])[["sum", "count"]].sum()
    sums = sums.groupby(["side", "seed"]).cumsum().reset_index().rename(columns={"end": "tokens"})
    sums = sums.assign(nll=sums["sum"] / sums["count"])[sums["tokens"] >= 4]
    first = Panel("Mean loss up to a position", sums, "nll", "tokens", "curve", True)
    return [first, *gap("Mean loss", sums, "nll", "tokens", sides)]


@figure("outliers", "Largest activations", "Table 5", "outliers_top",
        "Magnitudes of the attention logits before softmax (of DIFF both maps) and of the residual stream after each "
        "layer: the k-th largest, and the median.")  # fmt: skip
def outliers(rows: Rows, sides: Sides) -> list[Panel]:
    frame = rows["outliers_top"].assign(largest=lambda of: [f"{k:.0f}" if k else "median" for k in of["k"]])
    parts = ((frame[frame["layer"] == -1], "largest"), (frame[(frame["layer"] >= 0) & (frame["k"] == 1)], "layer"))
    return [
        Panel(name, of[of["kind"] == kind], "value", x, log=True)
        for of, x in parts
        for kind, name in (("logits", "Attention logits"), ("hidden", "Hidden states"))
        if (of["kind"] == kind).any()
    ]


@figure("quantization", "Attention logits in few bits", "Figure 8", "quantization",
        "Attention logits are rounded to so many bits before softmax. What that costs is the loss minus the loss with "
        "the most bits.")  # fmt: skip
def quantization(rows: Rows, sides: Sides) -> list[Panel]:
    loss = rows["quantization"].dropna(subset=["loss"])
    most = loss[loss["bits"] == loss.groupby(["side", "seed", "data_seed"])["bits"].transform("max")]
    most = most[["side", "seed", "data_seed", "example", "loss"]]
    cost = loss.merge(most, on=["side", "seed", "data_seed", "example"], suffixes=("", "_most"))
    cost = cost.assign(cost=cost["loss"] - cost["loss_most"])
    return [
        Panel("Loss it costs", cost, "cost", "bits", joined=True),
        Panel("Loss", loss, "loss", "bits", joined=True),
    ]


@figure("choices", "Right choices with attention logits in few bits", "Figure 8", "quantization_choice",
        "The likeliest ending by character, where attention logits have so many bits.")  # fmt: skip
def choices(rows: Rows, sides: Sides) -> list[Panel]:
    return [Panel("Right choices, share", rows["quantization_choice"], "score", "bits", joined=True)]


@figure("many_shot", "Learning from many examples", "Figures 6, 7, 9", "many_shot",
        "Classification after so many labelled examples, in several orders. The last panels have the accuracy of each "
        "order at the largest number.")  # fmt: skip
def many_shot(rows: Rows, sides: Sides) -> list[Panel]:
    frame = rows["many_shot"]
    panels = [
        Panel(f"Accuracy, {order}", of, "score", "shots", joined=True)
        for order, of in frame.groupby("order", sort=False)
    ]
    most = frame[frame["shots"] == frame.groupby(["side", "seed", "data_seed"])["shots"].transform("max")]
    most = most.rename(columns={"order_seed": "order drawn"})
    return panels + [
        Panel(f"By order, {order}", of, "score", "order drawn") for order, of in most.groupby("order", sort=False)
    ]


@figure("harness", "Downstream tasks", "Tables 1 and 8", "harness", "Accuracy as lm-evaluation-harness scores it.")
def harness(rows: Rows, sides: Sides) -> list[Panel]:
    return [Panel("Accuracy", rows["harness"], "score", "task")]


@figure("ruler", "RULER", "", "ruler", "Share of the expected strings that an answer contains, by task.")
def ruler(rows: Rows, sides: Sides) -> list[Panel]:
    frame = rows["ruler"]
    if frame["length"].nunique() == 1:
        return [Panel("Accuracy", frame, "score", "task")]
    return [Panel(f"{task}, by length", of, "score", "length", joined=True) for task, of in frame.groupby("task")]


@figure("hallucination", "Contextual hallucination", "Table 4", "hallucination",
        "Share of outputs that a judge finds free of hallucination.")  # fmt: skip
def hallucination(rows: Rows, sides: Sides) -> list[Panel]:
    return [Panel("Free of hallucination", rows["hallucination"], "score", "set")]


@figure("anatomy", "The anatomy of heads", "", "anatomy",
        "Of every head on held-out text, mean over the heads of a layer; importance is the gradient of the loss by a "
        "factor on the head.")  # fmt: skip
def anatomy(rows: Rows, sides: Sides) -> list[Panel]:
    frame = rows["anatomy"]
    titles = {
        "negative_mass": "Negative attention, share", "sink": "Attention on the first token, share",
        "keys": "Effective keys", "distance": "Distance of heads' maps", "cka": "CKA of heads' outputs",
        "importance": "Importance",
    }  # fmt: skip
    shown = {name: title for name, title in titles.items() if frame[name].notna().any()}
    key = ["side", "seed", "data_seed", "example", "layer"]
    means = frame.groupby(key, as_index=False)[list(shown)].mean()
    return [
        Panel(f"{title}, by layer", means.dropna(subset=[n]), n, "layer", joined=True) for n, title in shown.items()
    ]


@figure("heads", "Head by head", "", "anatomy",
        "Importance, and of DIFF the negative share, of each head: the darker, the larger.")  # fmt: skip
def heads(rows: Rows, sides: Sides) -> list[Panel]:
    frame = rows["anatomy"]
    place = [f"{layer:g}, {head:g}" for layer, head in zip(frame["layer"], frame["head"], strict=True)]
    frame = frame.assign(**{"layer, head": place})
    return [
        Panel(f"{title}: {name}", of, column, "layer, head", "heads")
        for column, title in (("importance", "Importance"), ("negative_mass", "Negative share"))
        for side, name in sides.items()
        if len(of := frame[(frame["side"] == side) & frame[column].notna()])
    ]


@figure("hessian", "The Hessian's extreme eigenvalues", "", "hessian",
        "Of the loss by all weights, the largest (1, 2, ...) and the smallest (-1, -2, ...); negative ones are "
        "directions in which the loss is not convex.")  # fmt: skip
def hessian(rows: Rows, sides: Sides) -> list[Panel]:
    frame = rows["hessian"]
    return [
        Panel(name, of, "value", "rank")
        for name, of in (("Largest", frame[frame["rank"] > 0]), ("Smallest", frame[frame["rank"] < 0]))
    ]


@figure("gradient_flow", "Gradient magnitudes", "Appendix F", "gradient_flow",
        "Root mean square of the loss's gradient in each projection, mean over layers: of the trained model, of a new "
        "DIFF and of its Transformer.")  # fmt: skip
def gradient_flow(rows: Rows, sides: Sides) -> list[Panel]:
    frame = rows["gradient_flow"]
    frame = frame[frame["part"].isin(["q", "k", "v", "qkv", "o"])]
    return [Panel(state, of, "rms", "part", log=True) for state, of in frame.groupby("state", sort=False)]


@figure("scaling", "Loss by size", "Figure 3", "scaling_runs", "Runs of both models, and their fitted power laws.")
def scaling(rows: Rows, sides: Sides) -> list[Panel]:
    return [
        Panel(title, of.rename(columns={"x": str(fit)}), name, str(fit), "curve", True)
        for fit, of in rows["scaling_runs"].groupby("fit", sort=False)
        for name, title in (("loss", "Loss"), ("fitted", "Fitted loss"))
    ]


@figure("lambda", "Lambda, layer by layer", "Section 2.1", "lambda", "Lambda of each layer over training.")
def lambdas(rows: Rows, sides: Sides) -> list[Panel]:
    frame = rows["lambda"]
    logged = frame.sort_values("step").groupby(["side", "seed", "layer"], as_index=False)
    ends = pd.concat([logged.head(1).assign(when="first"), logged.tail(1).assign(when="last")])
    ends = ends.sort_values(["layer", "when"]).assign(layer=lambda of: of["layer"].map("{:g} ".format) + of["when"])
    layers = [Panel(f"Layer {k:g}", of, "value", "step", "curve") for k, of in frame.groupby("layer")]
    return [*layers[:3], Panel("First and last value of each layer", ends, "value", "layer")]


@figure("throughput", "Speed", "Table 7", "throughput", "Tokens a second on equal batches, timed in turns.")
def throughput(rows: Rows, sides: Sides) -> list[Panel]:
    frame = rows["throughput"].assign(model=lambda of: of["side"].map(sides))
    ways = {"Training": "train_tokens_per_second", "Forward": "forward_tokens_per_second"}
    return [Panel(f"{title}, tokens a second", frame, y, "model") for title, y in ways.items()]


def of_own(experiment: str) -> Figure:
    """The figure of an experiment that is not of this package: the mean of each column of numbers."""

    def panels(rows: Rows, sides: Sides) -> list[Panel]:
        numbers, frame = numbers_of(experiment, rows), rows[experiment]
        points = frame.assign(all="all", **{name: frame[name].astype(float) for name in numbers})
        return [Panel(name.replace("_", " "), points, name, "all") for name in numbers]

    return Figure(experiment, experiment.replace("_", " ").capitalize(), "", experiment, "", panels)
