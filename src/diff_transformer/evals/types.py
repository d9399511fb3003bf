"""``Result``: what every experiment returns and the report reads."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from diff_transformer.checks import read_json
from diff_transformer.durable import write_whole


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

    def save(self, path: Path):
        """Write the result as JSON, atomically; create its folder if needed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.to_dict()) + "\n")

    @classmethod
    def load(cls, path: Path) -> "Result":
        """What ``save`` wrote."""
        return cls(**read_json(path))
