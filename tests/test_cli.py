import dataclasses
import errno
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import cli
from tiny_models import save_tiny_model, tiny_model

import diff_transformer
from diff_transformer.data.tokenizer import byte_tokenizer
from diff_transformer.lab.record import load_records

MINE = Path(__file__).parents[1] / "examples" / "my_experiment.py"


def in_a_process(*arguments):
    command = [sys.executable, "-m", "diff_transformer", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


@pytest.fixture(autouse=True)
def no_memory_is_kept(monkeypatch):
    """Commands run in this process, which goes on to other tests."""
    monkeypatch.setattr("diff_transformer.memory.keep_freed_memory", lambda: True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    for i in range(6):
        (folder / f"{i}.txt").write_text(" ".join(f"sentence {j} of file {i} is here." for j in range(200)))
    return folder


def test_import_loads_nothing_heavy():
    code = (
        "import sys, time; t = time.process_time(); import diff_transformer; t = time.process_time() - t;"
        "print(t, [m for m in ('torch', 'transformers', 'numpy', 'lightning_fabric') if m in sys.modules])"
    )
    seconds, loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.split(" ", 1)
    assert loaded.strip() == "[]"
    assert float(seconds) < 0.3


def test_help_loads_neither_torch_nor_transformers():
    code = (
        "import sys; sys.argv = ['diff-transformer', '--help']\n"
        "from diff_transformer.cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers', 'lightning_fabric') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "compare" in out
    assert out.strip().endswith("[]")


def test_every_name_resolves():
    for name in diff_transformer.__all__:
        assert getattr(diff_transformer, name) is not None
    with pytest.raises(AttributeError, match=r"no attribute 'DiffAttn'; it has .*DiffAttention"):
        _ = diff_transformer.DiffAttn


def test_version():
    out = in_a_process("--version")
    assert (out.returncode, out.stdout) == (0, f"diff-transformer {diff_transformer.__version__}\n")


def test_info():
    out = cli("info", "3B")
    assert out.returncode == 0, out.stderr
    assert "3,479,175,168" in out.stdout
    assert "830M" in cli("info").stdout


def test_one_experiment_into_a_folder(model, corpus, tmp_path):
    path = tmp_path / "outliers"
    sizes = ("--corpus", corpus, "--length", 480, "--samples", 2)
    command = ("eval", "outliers", "--model", model, *sizes, "--out", path)
    out = cli(*command)
    assert out.returncode == 0, out.stderr
    assert "largest attention logit" in out.stdout
    (record,) = load_records(path)
    assert (record.side, record.rows.experiments) == (model.name, ["outliers", "outliers_top"])
    assert {file.name for file in path.iterdir()} == {"outliers", "report.html", "request.json"}
    again = cli(*command)
    assert again.returncode == 2
    assert "is not an empty folder; resume it (--resume) or choose another" in again.stderr


def test_training_text_that_is_measured_for_want_of_held_out_text_is_said_first(corpus, tmp_path):
    gpt2 = tmp_path / "gpt2"
    tiny_model("gpt2").save_pretrained(gpt2)
    byte_tokenizer().save_pretrained(gpt2)
    sizes = ("--length", 64, "--samples", 300)
    command = ("eval", "outliers", "--model", gpt2, "--corpus", corpus, *sizes, "--out")
    told = cli(*command, tmp_path / "out")
    assert told.returncode == 0, told.stderr
    assert f"note: outliers of gpt2: the held-out text of '{corpus}' is too small, so " in told.stdout
    assert "the held-out text of" in (tmp_path / "out" / "report.html").read_text()
    refused = cli(*command, tmp_path / "no", "--split", "held-out")
    assert refused.returncode == 2
    assert "the held-out text of the corpus" in refused.stderr


def test_an_experiment_on_two_models_into_a_folder_with_a_report(model, corpus, tmp_path):
    command = (
        "eval", "long_nll", "--model", model, "--model", "debug", "--corpus", corpus, "--length", 64, "--samples", 2,
        "--out", tmp_path / "out",
    )  # fmt: skip
    out = cli(*command)
    assert out.returncode == 0, out.stderr
    assert {path.name for path in (tmp_path / "out" / "long_nll").iterdir()} == {
        f"{model.name}.jsonl.gz",
        "debug.jsonl.gz",
    }
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Does a longer context keep helping?" in page
    assert "is not an empty folder; resume it (--resume) or choose another" in cli(*command).stderr
    assert cli(*command, "--resume").returncode == 0
    page_again = cli(
        "report", tmp_path / "out" / "long_nll" / f"{model.name}.jsonl.gz", "--out", tmp_path / "again.html"
    )
    assert page_again.returncode == 0, page_again.stderr


def test_with_several_experiments_one_that_cannot_run_does_not_stop_the_others(model, corpus, tmp_path):
    from diff_transformer.lab.evaluate import Plan, run_suite

    plan = Plan(["needle", "outliers"], [str(model)], {"corpus": str(corpus), "length": 99999, "samples": 1})
    needle, outliers = run_suite(dataclasses.replace(plan, assignments=["outliers.length=64"]), tmp_path / "out")
    assert needle.record is None
    assert "99999" in needle.error
    assert outliers.record.rows.about("outliers")["tokens"] == 64
    smaller = dataclasses.replace(plan, assignments=["outliers.length=64"], batch_size=2)  # as for want of memory
    assert [of.path == outliers.path for of in run_suite(smaller, tmp_path / "out", resume=True)] == [False, True]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("info", "3b"), "no preset '3b'; there are: "),
        (("compare", "--recipe", "demoo", "--out", "x"), "no recipe 'demoo' (did you mean 'demo'?)"),
        (("compare", "--set", "optim.lrr=1", "--out", "x"), "no setting 'optim.lrr' (did you mean 'optim.lr'?)"),
        (("compare", "--corpus", "2024", "--out", "x"), "source '2024' is no file or folder"),
        (
            ("compare", "--recipe", "uptrain", "--set", "train.initial_model=m", "--out", "x"),
            "train.initial_model is m, and models that are compared start from random weights",
        ),
        (
            ("compare", "--recipe", "uptrain", "--out", "x"),
            "recipe 'uptrain' sets no model; give one to go on from: `diff-transformer compare --from MODEL`",
        ),
        (
            ("compare", "--from", "./nowhere", "--out", "x"),
            "nowhere has no config.json; give the folder",
        ),
        (
            ("train", "--set", 'evaluation.more={"sonnets":{}}', "--out", "x"),
            "no experiment of evaluation.more 'sonnets'; there are: harness",
        ),
        (("train", "--dry-run", "--set", "data.corpus=/none", "--out", "x"), "source '/none' is no file or folder"),
        (("eval", "sonnets", "--model", "m", "--out", "x"), "no experiment 'sonnets'; there are: harness, scaling"),
        (("eval", "needle", "--model", "/nowhere/m", "--out", "x.json"), "/nowhere/m cannot be loaded: "),
        (("eval", "needle", "--out", "x"), "no model; give --model"),
        (("eval", "needle", "--model", "debug", "--set", "colour=red", "--out", "x"), "no setting 'needle.colour'"),
        (("info", "--length", "0"), "length is 0; it must be positive"),
        (("info", "--attention", "dint"), "--length and --attention are for one preset; name it: debug, "),
        (("bench", "toaster"), "no benchmark 'toaster'"),
        (("report", "/nowhere", "--out", "x"), "/nowhere"),
        (("report", "/nowhere", "--table", "--figure", "losses"), "give --out FILE for a page or (--figure) a figure"),
        (("report", "/nowhere", "--out", "x", "--quantity", "loss"), "or --table for tables (--quantity)"),
        (("prepare", "texts"), "no folder to write to; give --out FOLDER"),
        (
            ("prepare", "python", "--out", "x", "--tokenizer", "bytes", "--vocab-size", "300"),
            "--vocab-size is for bpe, and --tokenizer is 'bytes'; leave out one of them",
        ),
        (("convert", "/nowhere", "--to", "gpt", "--out", "x"), "no target 'gpt'"),
    ],
)
def test_errors_are_messages(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = cli(*arguments)
    assert out.returncode == 2
    assert out.stderr.startswith("error: ")
    assert message in out.stderr
    assert "Traceback" not in out.stderr
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("train --recipe debug", "20 steps of 8 rows of 96 tokens, 15,360 in all, of python"),
        ("compare --recipe debug --seeds 2", "6 runs (DIFF, Transformer, Transformer + head norm): 92,160 tokens"),
        ("compare --quick --set train.steps=150 --variants softmax_norm", "Transformer + head norm): 921,600 tokens"),
        (
            f'compare --recipe debug --set evaluation.more={{"{MINE}":{{}}}}',
            f"then associative_recall, needle, allocation, outliers, {MINE}",
        ),
        ("study ablation", "21 runs ("),
        (
            "eval needle --model debug --set lengths=[64,96] --samples 3",
            "on debug (37,120 parameters)\n  needle: 120 prompts or rows, 9,600 tokens\nless than two minutes",
        ),
        ("eval all --quick --model debug --samples 2", "allocation: 10 prompts or rows, 1,240 tokens\n"),
    ],
)
def test_a_dry_run_says_what_and_how_much_and_writes_nothing(command, said, tmp_path, monkeypatch):
    out = cli(*command.split(), "--out", tmp_path / "x", "--dry-run")
    assert out.returncode == 0, out.stderr
    assert said in out.stdout
    assert not (tmp_path / "x").exists()
    monkeypatch.setenv("RANK", "1")
    if command.startswith("train"):
        assert not cli(*command.split(), "--out", tmp_path / "x", "--dry-run").stdout


def test_a_bug_shows_its_traceback(monkeypatch, tmp_path):
    monkeypatch.setattr("diff_transformer.train.loop.train", lambda *_, **__: {}["a bug"])
    with pytest.raises(KeyError, match="a bug"):
        cli("train", "--recipe", "debug", "--out", tmp_path / "x")


def test_paths_with_brackets_are_shown_as_they_are(monkeypatch, tmp_path):
    def train(config, out, *, announce, **_):
        announce("of my[b]/texts")
        return SimpleNamespace(folder=out)

    monkeypatch.setattr("diff_transformer.train.loop.train", train)
    assert "of my[b]/texts" in cli("train", "--recipe", "debug", "--out", tmp_path / "x").stdout


def test_a_full_disk_is_a_message(monkeypatch, tmp_path):
    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.jsonl")

    monkeypatch.setattr("diff_transformer.train.loop.train", full)
    out = cli("train", "--recipe", "debug", "--out", tmp_path / "x")
    assert (out.returncode, out.stderr) == (2, "error: [Errno 28] No space left on device: 'metrics.jsonl'\n")
