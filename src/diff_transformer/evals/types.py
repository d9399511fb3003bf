"""``Result``: what every experiment returns; ``lab/tidy.py`` makes rows of it."""

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Result:
    """The outcome of one experiment on one model.

    Attributes:
        eval: name of the experiment.
        model: name of the model under test.
        metrics: the cells of the paper's table.
        rows: one dictionary an example (prompt, expected, got, score, ...).
        provenance: resolved settings, seed, commit, device, dtype, versions, date.
    """

    eval: str
    model: str
    metrics: dict[str, float]
    rows: list[dict] = field(default_factory=list)
    provenance: dict = field(default_factory=dict)

    def to_dict(self) -> dict:
        return asdict(self)
