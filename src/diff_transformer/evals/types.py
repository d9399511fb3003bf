"""``Result``: what every experiment returns. It is kept as a ``Record``."""

from dataclasses import asdict, dataclass, field
from pathlib import Path

from diff_transformer.lab.record import RecordError, of_result, read_json, records_of


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
        """Write the result as the record of its model (``lab/record.py``), atomically; create its folder if needed."""
        of_result(self).save(path)

    @classmethod
    def load(cls, path: Path) -> "Result":
        """The object that ``save`` wrote to a file.

        Raises:
            RecordError: if the file holds anything else.
        """
        found = [(record, name) for record in records_of(read_json(path), path) for name in record.metrics]
        if len(found) != 1:
            raise RecordError(f"{path} holds {len(found)} results; give the file of one experiment on one model")
        ((record, name),) = found
        about = record.provenance.get(name, {})
        model = f"{record.side}-seed{record.seed}" if "run" in about else record.side
        return cls(name, model, record.metrics[name], record.rows.get(name, []), about)
