"""From the rows of an experiment to one row an example, as quantities read them."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from diff_transformer.lab.rows import MODEL, UNIT

if TYPE_CHECKING:
    import pandas as pd

GOAL = 0.9  # accuracy of recall whose first step is an outcome


def last_step(frame: "pd.DataFrame") -> "pd.DataFrame":
    last = frame.dropna(subset=["loss"]).sort_values("step", kind="stable").groupby(["side", "seed"]).tail(1)
    return last.assign(example=0)


def loss_up_to(position: float) -> "Callable[[pd.DataFrame], pd.DataFrame]":
    """For each document, its mean loss over the first ``position`` tokens; none where no bin ends there."""

    def of(frame: "pd.DataFrame") -> "pd.DataFrame":
        frame = frame[frame["end"] <= position]
        return whole_length(frame[frame.groupby(list(UNIT))["end"].transform("max") == position])

    return of


def whole_length(frame: "pd.DataFrame") -> "pd.DataFrame":
    """For each document, its mean loss over all tokens that were measured."""
    sums = frame.groupby(list(UNIT), sort=False)[["sum", "count"]].sum().reset_index()
    return sums.assign(loss=sums["sum"] / sums["count"])


def cost_of_bits(bits: int, column: str) -> "Callable[[pd.DataFrame], pd.DataFrame]":
    """For each row of text, its loss with logits of so many bits minus that with the most, if the model has more."""

    def of(frame: "pd.DataFrame") -> "pd.DataFrame":
        most = frame[frame["bits"] == frame.groupby([*MODEL, "data_seed"])["bits"].transform("max")]
        both = frame[frame["bits"] == bits].merge(most, on=list(UNIT), suffixes=("", "_most"))
        return both.assign(cost=both[column] - both[f"{column}_most"])[both["bits"] < both["bits_most"]]

    return of


def times_the_length(times: int) -> "Callable[[pd.DataFrame], pd.DataFrame]":
    """The rows of recall with ``times`` the length of the shortest, which is the trained one, of each model."""

    def of(frame: "pd.DataFrame") -> "pd.DataFrame":
        trained = frame.groupby(["setting", "side", "seed", "data_seed"])["length"].transform("min")
        return frame.assign(share=frame["hits"] / frame["questions"])[frame["length"] == times * trained]

    return of


def where(**values: object) -> "Callable[[pd.DataFrame], pd.DataFrame]":
    """The rows whose columns have these values."""

    def of(frame: "pd.DataFrame") -> "pd.DataFrame":
        for column, value in values.items():
            frame = frame[frame[column] == value]
        return frame

    return of


def orders(order: str) -> "Callable[[pd.DataFrame], pd.DataFrame]":
    """The score of each question under each order of the examples, at the largest number of them."""

    def of(frame: "pd.DataFrame") -> "pd.DataFrame":
        frame = frame[frame["order"] == order]
        frame = frame[frame["shots"] == frame.groupby(["side", "seed", "data_seed"])["shots"].transform("max")]
        wide = frame.pivot_table(index=list(UNIT), columns="order_seed", values="score", sort=False)
        return wide.set_axis([f"order {seed}" for seed in wide], axis=1).reset_index()

    return of


def many_orders(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The mean score of each question over its random orders."""
    wide = orders("random")(frame)
    return wide[list(UNIT)].assign(score=wide.drop(columns=list(UNIT)).mean(axis=1))


def steps_to_goal(frame: "pd.DataFrame") -> "pd.DataFrame":
    return frame.groupby(["setting", "side", "seed"], sort=False, group_keys=True).apply(first_step).reset_index()


def first_step(curve: "pd.DataFrame") -> "pd.Series":
    """The step at which accuracy first reaches ``GOAL``, on a straight line between two points; else the last step."""
    import pandas as pd

    steps, accuracy = curve["step"].to_numpy(float), curve["accuracy"].to_numpy(float)
    at = steps[0] if accuracy[0] >= GOAL else steps[-1]
    for place in range(1, len(steps) if accuracy[0] < GOAL else 0):
        if accuracy[place] >= GOAL:
            low, high = accuracy[place - 1 : place + 1]
            at = steps[place - 1] + (steps[place] - steps[place - 1]) * (GOAL - low) / (high - low)
            break
    return pd.Series({"data_seed": 0, "example": 0, "steps": at, "log2": np.log2(at) if at > 0 else np.nan})


def late_loss(*names: str) -> "Callable[[pd.DataFrame], pd.DataFrame]":
    """The training loss of sources of the mixture over their last 8 points, and the mean over the sources."""

    def of(frame: "pd.DataFrame") -> "pd.DataFrame":
        frame = frame[frame["source"].isin(names)]
        last = frame.groupby(["setting", "side", "seed", "source"], sort=False).tail(8)
        means = last.groupby(["setting", "side", "seed", "source"], sort=False)["loss"].mean().reset_index()
        both = means.groupby(["setting", "side", "seed"], sort=False)["loss"].agg(["mean", "size"]).reset_index()
        complete = both[both["size"] == len(names)]
        return complete.assign(data_seed=0, example=0, loss=complete["mean"])

    return of


def mean_of(column: str) -> "Callable[[pd.DataFrame], pd.DataFrame]":
    """The mean of a column over the rows of each example, as over the heads of all layers for a row of text."""

    def of(frame: "pd.DataFrame") -> "pd.DataFrame":
        return frame.groupby(list(UNIT), sort=False)[column].mean().reset_index()

    return of


def importance_gini(frame: "pd.DataFrame") -> "pd.DataFrame":
    """The Gini index of the importance of all heads, for each row of text: 0 if all matter alike."""

    def gini(values: "pd.Series") -> float:
        ordered = np.sort(values.to_numpy(float))
        ranks = np.arange(1, len(ordered) + 1)
        return float(2 * (ranks * ordered).sum() / (len(ordered) * ordered.sum()) - (len(ordered) + 1) / len(ordered))

    return frame.groupby(list(UNIT), sort=False)["importance"].agg(gini).reset_index()


def over_layers(state: str, part: str) -> "Callable[[pd.DataFrame], pd.DataFrame]":
    def of(frame: "pd.DataFrame") -> "pd.DataFrame":
        return where(state=state, part=part)(frame).groupby(list(UNIT), sort=False)["rms"].mean().reset_index()

    return of
