"""Wrong command lines, made from what each command declares: each ends in words, with an exit code that is not 0."""

from collections import Counter
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import typer
from tiny_models import save_tiny_model

from diff_transformer.cli import app

pytestmark = pytest.mark.faults
ROOT = Path(__file__).parents[2]
COMMANDS = {  # serve passes options on
    name: command for name, command in typer.main.get_command(app).commands.items() if name != "serve"
}
FUNCTIONS = {one.name or one.callback.__name__: one.callback for one in app.registered_commands}
ANY_TEXT = {("prepare", "--field")}  # text files have no fields
WRONG = {int: ["x", "-1", "1.5"], float: ["x", "nan", "-1"]}
ASSIGNMENTS = [
    "=", "train", "train.steps", "train.steps=", "train.steps=x", "train.steps=-1", "train.steps=1.5",
    'train.steps={"a": 1}', "no.such=1", "model.hidden_size=0", "model.hidden_size=[]",
    "model.num_attention_heads=7", "model.attention=none", "model.vocab_size=-5", "data.mixture={}", "data.mixture=[1]",
    'data.mixture={"text": -1}', "data.mixture.prose=1", "data.corpus=/nowhere", "data.tokenizer=/nowhere",
    "data.length=1000000", "optim.lr=0", "optim.lr=Infinity", "optim.betas=[1]", "optim.betas=[2,2]",
    "train.precision=16-true", "train.parallel.strategy=none", "train.seed=-1",
    "train.initial_model=/nowhere", "train.batch_size=7 ", "train.threads=-1",
]  # fmt: skip


@pytest.fixture
def right(texts, tmp_path) -> dict[str, list[str]]:
    """A command line of each command that works; the folder or file to write, which is new, comes last."""
    model, run = str(save_tiny_model(tmp_path / "model")), ["--recipe", "debug", "--set", f"data.corpus={texts}"]
    lines = {
        "compare": [*run, "--out"],
        "train": [*run, "--out"],
        "prepare": [str(texts), "--tokenizer", "bytes", "--out"],
        "study": ["desk", "--corpus", str(texts), "--minutes", "1", "--out"],
        "eval": ["needle", "--model", model, "--quick", "--samples", "1", "--length", "256", "--out"],
        "bench": ["attention", "--grid", "1x1x8x8", "--out"],
        "report": [str(ROOT / "figures/demo/measured.jsonl.gz"), "--out"],
        "info": ["3B"],
        "convert": [model, "--to", "diffllama", "--out"],
        "generate": [model, "a", "--max-new-tokens", "1"],
    }
    assert set(lines) == set(COMMANDS)
    return lines


def wrong_lines(name: str, right: list[str], folder: Path) -> list[list[str]]:
    """The right line with one thing wrong."""
    out = [str(folder / "new.json" if name in ("bench", "report") else folder / "new")]
    right = right + out if right[-1] == "--out" else right
    lines = [[*right, "--no-such-option"], [*right, "one", "argument", "more"]]
    lines += [right[1:]] if name != "info" else []  # which lists all presets
    kinds = get_type_hints(FUNCTIONS[name])
    for option in COMMANDS[name].params:
        flag = option.opts[0]
        if option.name not in kinds or (name, flag) in ANY_TEXT or option.param_type_name != "option":
            continue
        kind = next((kind for kind in (get_args(kinds[option.name]) or (kinds[option.name],)) if kind in WRONG), None)
        values = WRONG.get(kind, ["no such thing"])
        if flag == "--set":
            values = ASSIGNMENTS if name in ("train", "compare") else ["=", "no.such=1", "seed=x"]
        if flag == "--out":
            (folder / "a file").write_text("mine")
            values = [str(folder / "a file" / "new"), str(folder), "/proc/nothing/new", ""]
        if option.is_flag:
            lines += [[*right, f"{flag}={value}"] for value in values]
        else:
            lines += [[*right, flag, value] for value in values] + [[*right, flag]]
    places = [folder / "empty", folder / "a file", Path("/nowhere"), folder / ("x" * 300), Path("/dev/null")]
    (folder / "empty").mkdir(exist_ok=True)
    if name not in ("compare", "train"):
        right_text = [folder / "a file"] if name == "prepare" else []
        lines += [[str(place), *right[1:]] for place in places if place not in right_text]
    return lines


@pytest.mark.parametrize("name", COMMANDS)
def test_wrong_command_lines(cli, right, tmp_path, reliability, name):
    outcomes, wrong = Counter(), []
    for line in wrong_lines(name, right[name], tmp_path):
        code, said = cli(name, *line, limit=60)
        if code in (0, None) or "Traceback" in said or not said.strip():
            wrong.append((code, line, said[-800:]))
        outcomes["refused in words"] += 1
    assert not wrong, "\n\n".join(f"exit {code}: {line}\n{said}" for code, line, said in wrong)
    reliability("Wrong command lines", f"`{name}`", outcomes)
