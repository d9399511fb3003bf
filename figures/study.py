"""What the command of a study's folder does: record the runs, fill the tables of pages, draw the plots.

python figures/NAME/run.py runs/NAME             # record what is finished there, then the rest
python figures/NAME/run.py                       # tables and plots again from measured.json
python figures/NAME/run.py --check               # exit 1 if a page or a plot differs from measured.json
python figures/NAME/run.py --restore runs/NAME   # the recorded runs as a folder that the study goes on with
"""

import argparse
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from archive import cells_of, keep_study, restore

from diff_transformer.lab.record import Cells, RecordError
from diff_transformer.lab.stages import Stage
from diff_transformer.report.generated import filled, keep

Pages = dict[Path, tuple[str, Callable[[Cells], str]]]  # page -> its markers' name, and what stands between them


def study_command(arguments: list[str], here: Path, pages: Pages, charts: Callable[[Cells], dict], **kept: Any) -> int:
    """``FOLDER`` records it first, ``--check`` only names stale files, ``--restore FOLDER`` writes recorded runs there.

    ``kept`` is for ``keep_study``. Returns the exit status: 1 if ``--check`` found a stale file.
    """
    measured = here / "measured.json"
    parser = argparse.ArgumentParser(
        prog=f"python figures/{here.name}/run.py", description="Make the tables and plots of a study from its record."
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("folder", nargs="?", type=Path, help="of a study: record what is finished there first")
    what.add_argument("--check", action="store_true", help="only name the pages and plots that differ from the record")
    what.add_argument(
        "--restore", type=Path, metavar="FOLDER", help="only write the recorded runs there, to go on with"
    )
    given = parser.parse_args(arguments)
    if given.restore:
        restore(cells_of(here), given.restore)
        return 0
    if given.folder:
        try:
            keep_study(given.folder, measured, **kept)
        except RecordError as error:
            parser.error(f"{error}; give the folder of a study")
    if not measured.exists():
        return 0
    cells = cells_of(here)
    texts = {page: filled(page, {name: make(cells)}) for page, (name, make) in pages.items()}
    return keep({**texts, **{here / name: chart for name, chart in charts(cells).items()}}, check=given.check)


def counted(cells: Cells, parts: dict[str, Iterable[Stage]]) -> str:
    """How many runs of each part of a plan are recorded; ``parts`` has their names."""
    said = []
    for name, stages in parts.items():
        runs = [identity for stage in stages for identity in stage.identities()]
        done = sum(seed in cells.get(setting, {}).get(side, {}) for setting, side, seed in runs)
        said.append(f"{done} of {len(runs)} runs of {name}")
    return "; ".join(said)
