"""The journal of an experiment: what is finished is not computed again, and another run's journal is refused."""

import pytest

from diff_transformer.errors import UserError
from diff_transformer.evals.samples import Samples

SETTINGS = {"length": 8, "depths": (0, 1)}


def rows(samples: Samples, stop: int | None = None) -> tuple[list[dict], list[int]]:
    """The rows of five items, and which were computed; raises KeyboardInterrupt at the item ``stop``."""
    computed = []

    def score(items):
        if stop in items:
            raise KeyboardInterrupt
        computed.extend(items)
        return [{"square": item * item} for item in items]

    return samples.rows("squares", range(5), score), computed


@pytest.mark.parametrize("cut", [0, 1, 9])
def test_an_interrupted_journal_goes_on_twice(tmp_path, cut):
    path = tmp_path / "journal"
    with pytest.raises(KeyboardInterrupt):
        rows(Samples(path, settings=SETTINGS), stop=3)
    path.write_bytes(path.read_bytes()[: -cut or None])
    with pytest.raises(KeyboardInterrupt):
        rows(Samples(path, settings=SETTINGS, resume=True), stop=4)
    found, computed = rows(samples := Samples(path, settings=SETTINGS, resume=True))
    assert [row["square"] for row in found] == [0, 1, 4, 9, 16]
    assert computed == [4]
    samples.done()
    assert not path.exists()


def test_another_journal_is_refused(tmp_path):
    path = tmp_path / "journal"
    with pytest.raises(KeyboardInterrupt):
        rows(Samples(path, settings=SETTINGS), stop=3)
    with pytest.raises(UserError, match="holds an interrupted run; resume it"):
        Samples(path, settings=SETTINGS)
    with pytest.raises(ValueError, match=r"other settings \(saved against given\):\n  length: 8 against 9"):
        Samples(path, settings={**SETTINGS, "length": 9}, resume=True)
    for text in ("a page\n", '{"part": "squares"}\n', "[1]\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="is not a journal of an experiment; delete it"):
            Samples(path, settings=SETTINGS, resume=True)
