"""The command line, run in this process: torch and transformers are loaded already."""

import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from types import SimpleNamespace
from unittest import mock

from diff_transformer.cli import main


def cli(*arguments) -> SimpleNamespace:
    """``returncode``, ``stdout`` and ``stderr`` of ``diff-transformer ARGUMENTS``."""
    out, err, status = StringIO(), StringIO(), 0
    command = ["diff-transformer", *map(str, arguments)]
    with redirect_stdout(out), redirect_stderr(err), mock.patch.object(sys, "argv", command):
        try:
            main()
        except SystemExit as ended:
            status = ended.code or 0
    return SimpleNamespace(returncode=status, stdout=out.getvalue(), stderr=err.getvalue())
