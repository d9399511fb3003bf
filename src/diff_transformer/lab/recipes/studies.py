"""Studies by name: functions from a corpus to a plan of many runs."""

from collections.abc import Callable

from diff_transformer.checks import require_known
from diff_transformer.lab.recipes.desk_study import desk_study
from diff_transformer.lab.recipes.ladder import ladder_study
from diff_transformer.lab.recipes.stability import stability_study
from diff_transformer.lab.spec import Study

STUDIES: dict[str, Callable[[str], Study]] = {
    "desk": desk_study,
    "ladder": ladder_study,
    "stability": stability_study,
}


def study(name: str, corpus: str = "python") -> Study:
    """The plan of the study called ``name`` on ``corpus`` (as ``data.corpus`` of a run).

    Raises:
        ValueError: for a name that is not in ``STUDIES``.
    """
    require_known("study", name, STUDIES)
    return STUDIES[name](corpus)
