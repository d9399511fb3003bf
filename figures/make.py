"""Fill the tables of the folders' README files and draw their pictures, from the records beside them.

    python figures/make.py           # every folder
    python figures/make.py --check   # exit 1 if a table differs from its record

A README has, in a comment, the command that makes what follows: tables up to ``<!-- end -->``, or a picture.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

FIGURES = Path(__file__).resolve().parent
TABLE = re.compile(
    r"<!-- (diff-transformer report [^\n]*? --table[^\n]*?|python figures/\w+/primary\.py) -->\n.*?<!-- end -->",
    re.DOTALL,
)
PICTURE = re.compile(r"<!-- (diff-transformer report [^\n]*? --figure [^\n]*?) -->")


def run(command: str) -> str:
    """The output of a command of this package or of a script, run in the folder above ``figures``."""
    program, *words = shlex.split(command)
    words = words if program == "python" else ["-m", "diff_transformer", *words]
    return subprocess.run(
        [sys.executable, *words], cwd=FIGURES.parent, capture_output=True, text=True, check=True
    ).stdout


def filled(text: str) -> str:
    """``text`` with the tables that its commands print."""

    return TABLE.sub(lambda found: f"<!-- {found[1]} -->\n{run(found[1]).strip()}\n<!-- end -->", text)


def main() -> int:
    stale = 0
    for page in sorted(FIGURES.glob("*/README.md")):
        text = page.read_text()
        made = filled(text)
        if "--check" in sys.argv:
            stale |= made != text
            print(*[f"{page} differs from its record: run python figures/make.py"] * (made != text), sep="\n", end="")
            continue
        page.write_text(made)
        for found in PICTURE.finditer(text):
            run(f"{found[1]} --overwrite")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
