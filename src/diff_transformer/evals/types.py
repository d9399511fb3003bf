"""``Result``: what every experiment returns."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Result:
    """The rows of one experiment on one model; ``lab/quantities.py`` makes numbers of them.

    Attributes:
        experiment: its name.
        rows: one dictionary an example, with the columns of ``lab.rows.TABLES`` and texts (prompt, expected, got).
            ``example`` names it, by default its place; sides are paired by it, and several rows of one example are
            averaged. A row of another table than that of the experiment has its name in ``experiment``; without a model
            to measure, rows say theirs in ``side``.
        about: settings, and facts that were found out, as the number of texts.
    """

    experiment: str
    rows: list[dict]
    about: dict = field(default_factory=dict)
