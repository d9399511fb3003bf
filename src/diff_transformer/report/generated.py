"""Pages and charts that scripts make from records: between marks of a page, and only where they differ.

A page has the lines ``<!-- NAME -->`` and ``<!-- /NAME -->`` around each part that is made.
"""

import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from diff_transformer.errors import UserError
from diff_transformer.report.render import Chart, is_current, save


def filled(page: Path, parts: Mapping[str, str]) -> str:
    """The text of ``page`` with each of ``parts``, by name, between its marks.

    Raises:
        ValueError: if the page has not exactly one pair of marks of a name.
    """
    text = page.read_text()
    for name, part in parts.items():
        pattern = rf"(?<=<!-- {name} -->\n).*?(?=<!-- /{name} -->)"
        text, found = re.subn(pattern, lambda _, part=part: part and f"{part}\n", text, flags=re.DOTALL)
        if found != 1:
            raise UserError(f"{page} has {found} pairs of lines <!-- {name} --> and <!-- /{name} -->; give it one")
    return text


def keep(made: Mapping[Path, str | Chart], *, check: bool = False) -> int:
    """Write each page and draw each chart that is not there already; with ``check``, only name them.

    Returns:
        The exit status of a script: 1 if ``check`` found one.
    """
    stale = {path: new for path, new in made.items() if not _is_there(path, new)}
    for path, new in stale.items():
        if check:
            print(f"{os.path.relpath(path)} differs from its sources: run python {os.path.relpath(sys.argv[0])}")
        elif isinstance(new, str):
            path.write_text(new)
        else:
            save(new, path)
    return int(check and bool(stale))


def _is_there(path: Path, new: str | Chart) -> bool:
    return is_current(new, path) if isinstance(new, dict) else path.exists() and path.read_text() == new
