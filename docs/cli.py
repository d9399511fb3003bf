"""Write docs/cli.md, the reference of the command line, from the command line itself.

python docs/cli.py          # write
python docs/cli.py --check  # exit 1 if the page differs
"""

import sys
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

from diff_transformer.cli import app

PAGE = Path(__file__).resolve().parent / "cli.md"


def reference() -> str:
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="diff-transformer", title="Commands")
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        return int(not PAGE.exists() or PAGE.read_text() != reference())
    PAGE.write_text(reference())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
