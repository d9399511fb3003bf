"""The reference pages of the site, of the command line and of ``--set``, from the code itself."""

import ast
import dataclasses
import inspect
import json
import re
from collections.abc import Iterator

import typer
from typer.cli import get_docs_for_click

from diff_transformer import DiffTransformerConfig
from diff_transformer.cli import app
from diff_transformer.lab.evaluate import EXPERIMENTS, experiment
from diff_transformer.train.config import RunConfig

INTRODUCTION = """\
# Settings

`--set KEY=VALUE` changes a setting; it may be repeated. A value is JSON, or text without quotes. Where a text says
None, write null. An unknown key is refused, with the nearest known one.

    diff-transformer train --recipe demo --out run --set optim.lr=1e-3 --set 'data.mixture={"text": 1}'
    diff-transformer eval needle --model FOLDER --out runs/needle --set samples=20

## Training: `train` and `compare`

A recipe sets what differs from these defaults. `compare` trains both sides with the same settings.
"""


def commands() -> str:
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="diff-transformer", title="Commands")
    text = re.sub(r"\*\*Commands\*\*:\n\n(?:\* .*\n)+\n", "", text)  # their first lines, cut off
    text = text.replace("* `--help`: Show this message and exit.\n", "")
    text = text.replace("**Usage**:\n\n", "")
    return "\n".join(line.rstrip() for line in text.strip().splitlines()) + "\n"


def settings() -> str:
    said = notes(DiffTransformerConfig)
    fields = [field for field in dataclasses.fields(DiffTransformerConfig) if field.name in said]
    model = [row(field, f"model.{field.name}", said[field.name]) for field in fields]
    parts = [INTRODUCTION, table([*model, *training(RunConfig, "")]), "## Experiments: `eval`\n"]
    first: dict[str, str] = {}  # a long text -> the experiment that has it first; others refer to it
    for name, what in EXPERIMENTS.items():
        of, quick = experiment(name).Settings, experiment(name).QUICK
        said = {key: text if first.setdefault(text, name) == name or len(text) < 60 else f"as for `{first[text]}`"
                for key, text in notes(of).items()}  # fmt: skip
        rows = [row(field, field.name, said[field.name], quick) for field in dataclasses.fields(of)]
        parts.append(f"### {name}\n\n{what}.\n\n{table(rows, ' `--quick` |')}")
    return "\n".join(parts)


def table(rows: list[str], more: str = "") -> str:
    head = f"| setting | default |{more} what it is |"
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows]) + "\n"


def training(cls: type, prefix: str) -> Iterator[str]:
    """The rows of a part of the configuration and of the parts in it."""
    said = notes(cls)
    for field in dataclasses.fields(cls):
        part = field.default_factory
        if dataclasses.is_dataclass(part):
            yield from training(part, f"{prefix}{field.name}.")
        elif prefix:
            yield row(field, prefix + field.name, said[field.name])


def row(field: dataclasses.Field, name: str, said: str, quick: dict | None = None) -> str:
    assert said, f"{name} has no comment in the code"
    made = field.default_factory
    cells = [f"`{name}`", value(field.default if made is dataclasses.MISSING else made())]
    if quick is not None:
        cells.append(value(quick[field.name]) if field.name in quick else "")
    return f"| {' | '.join([*cells, said.replace('|', chr(92) + '|')])} |"


def value(given) -> str:
    return f"`{json.dumps(given)}`"


def notes(cls: type) -> dict[str, str]:
    """What the code says of each field of a dataclass: the comments above it and behind it, or the text below it."""
    lines = inspect.getsource(cls).splitlines()
    found, body = {}, ast.parse("\n".join(lines)).body[0].body
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign):
            above, at = [], node.lineno - 2
            while re.match(r"\s*#", lines[at]):
                above.insert(0, lines[at].strip(" #"))
                at -= 1
            behind = lines[node.end_lineno - 1][node.end_col_offset :].partition("#")[2].strip()
            match after:
                case ast.Expr(ast.Constant(str(below))):
                    below = " ".join(below.replace("``", "`").split())
                case _:
                    below = ""
            found[node.target.id] = " ".join([*above, behind, below]).strip()
    return found


PAGES = {"docs/cli.md": commands, "docs/settings.md": settings}  # on the site
