"""The command line. Each command is a thin wrapper of one importable function."""

import sys
from importlib import import_module

from diff_transformer.cli.app import app

__all__ = ["app", "main"]

for _commands in ("training", "measuring", "models"):  # in the order in which --help lists them
    import_module(f"{__name__}.{_commands}")


def main():
    """Run the command line. An error that a user can fix is a message, not a traceback."""
    try:
        app()
    except (ValueError, TypeError, OSError, FloatingPointError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
