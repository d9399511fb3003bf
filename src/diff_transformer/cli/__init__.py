"""The command line. Each command is a thin wrapper of one importable function."""

import errno
import sys
from importlib import import_module

from diff_transformer.cli.app import app
from diff_transformer.errors import UserError
from diff_transformer.train.ranks import is_first

__all__ = ["app", "main"]

# a disk, a quota or a file that is full; a folder that may not be written to
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM}

for _commands in ("training", "measuring", "models"):  # in the order in which --help lists them
    import_module(f"{__name__}.{_commands}")


def main():
    """Run the command line. A mistake of the user and a disk that takes no more are a message; a bug is a traceback."""
    try:
        app()
    except UserError as error:
        if is_first():  # of several processes, which all fail alike
            print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:
        if error.errno not in _DISK:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
