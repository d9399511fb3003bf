"""Model folders, checkpoints, archives and text that mean harm: nothing runs, and nothing is written outside."""

import gzip
import io
import json
import lzma
import os
import pickle
import shutil
import tarfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from browser import CHROMIUM, needs_chromium
from killed_runs import assert_words
from safetensors.torch import load_file
from tiny_models import save_tiny_model

from diff_transformer.train.checkpoint import latest_checkpoint, write_manifest

pytestmark = pytest.mark.faults
EVIL = "import pathlib; pathlib.Path({!r}).touch()\n"
TEMPLATE = "{{{{ cycler.__init__.__globals__.os.system('touch {}') }}}}"


class Trap:
    """Unpickling it leaves a file behind."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def edit(path: Path, **fields):
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def only_a_pickle(folder: Path, sprung: Path):
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Trap(sprung)}, folder / "pytorch_model.bin")


def an_index_that_names_a_pickle(folder: Path, sprung: Path):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / "model-2.bin").write_bytes(pickle.dumps(Trap(sprung)))
    index = {"weight_map": {"model.norm.weight": "model-2.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def a_pickle_by_another_name(folder: Path, sprung: Path):
    (folder / "model.safetensors").write_bytes(pickle.dumps(Trap(sprung)))


def code_of_an_unknown_model(folder: Path, sprung: Path):
    code_beside_our_model(folder, sprung)
    edit(folder / "config.json", model_type="evil", architectures=["Evil"])


def a_link_to_no_weights(folder: Path, sprung: Path):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/etc/passwd")


def an_index_that_leaves_the_folder(folder: Path, sprung: Path):
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"model.norm.weight": "../../../../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def an_index_that_names_weights_outside(folder: Path, sprung: Path):
    names = list(load_file(folder / "model.safetensors"))
    (folder / "model.safetensors").rename(folder.parent / "outside.safetensors")
    index = {"weight_map": dict.fromkeys(names, "../outside.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def settings(**fields):
    """A folder whose config.json says this."""

    def harm(folder: Path, sprung: Path):
        edit(folder / "config.json", **fields)

    harm.__name__ = "_".join(f"{name}_{value}" for name, value in fields.items())
    return harm


def a_config_nested_deeply(folder: Path, sprung: Path):
    (folder / "config.json").write_text("[" * 10**5)


def a_config_that_is_not_utf8(folder: Path, sprung: Path):
    (folder / "config.json").write_bytes(b'{"a": "\xff"}')


def pickles_beside_the_model(folder: Path, sprung: Path):
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt", "scheduler.pt", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Trap(sprung)))


def code_beside_our_model(folder: Path, sprung: Path):
    for name in (
        "modeling_evil.py",
        "configuration_evil.py",
        "tokenization_evil.py",
        "conftest.py",
        "sitecustomize.py",
    ):
        (folder / name).write_text(EVIL.format(str(sprung)))
    automatic = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    edit(folder / "config.json", auto_map=automatic)
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization_evil.Evil", None]})


def a_template_that_runs(folder: Path, sprung: Path):
    (folder / "chat_template.jinja").write_text(TEMPLATE.format(sprung))


REFUSED = [only_a_pickle, an_index_that_names_a_pickle, a_pickle_by_another_name, code_of_an_unknown_model,
           a_link_to_no_weights, an_index_that_leaves_the_folder]  # fmt: skip
WRONG = [
    an_index_that_names_weights_outside, a_config_nested_deeply, a_config_that_is_not_utf8, settings(dtype="float4"),
    settings(rms_norm_eps="x"), settings(rms_norm_eps=-1), settings(hidden_size=10**12), settings(vocab_size=10**12),
    settings(intermediate_size=10**12), settings(num_hidden_layers=100_000), settings(num_hidden_layers=1),
]  # fmt: skip
HARMLESS = [pickles_beside_the_model, code_beside_our_model, a_template_that_runs]


def test_model_folders(cli, texts, tmp_path, reliability):
    outcomes = Counter()
    for harm in (*REFUSED, *HARMLESS):
        name = harm.__name__
        folder, sprung = save_tiny_model(tmp_path / name), tmp_path / f"{name}.sprung"
        harm(folder, sprung)
        training = ["train", "--recipe", "debug", "--set", f"data.corpus={texts}", "--set", "train.steps=1"]
        for number, command in enumerate(
            (
                ["generate", folder, "a", "--max-new-tokens", "1"],
                ["eval", "needle", "--model", folder, "--quick", "--limit", "1", "--length", "256"],
                ["convert", folder, "--to", "diffllama"],
                [*training, "--set", f"train.initial_model={folder}", "--set", f"data.tokenizer={folder}"],
            )
        ):
            out = [] if command[0] == "generate" else ["--out", tmp_path / f"{name}{number}"]
            code, said = cli(*command, *out)
            assert not sprung.exists(), (name, command)
            assert "Traceback" not in said, said
            if harm in REFUSED:
                assert_words((code, said), "")
                outcomes["refused in words, nothing ran"] += 1
            else:
                outcomes["read as data, nothing ran" if code == 0 else "refused in words, nothing ran"] += 1
    reliability("Hostile files", "model folders: pickles, `auto_map`, code, templates, links and paths out", outcomes)


def test_a_checkpoint_with_a_pickle(cli, texts, tmp_path, reliability):
    run, sprung = tmp_path / "run", tmp_path / "sprung"
    command = ["train", "--recipe", "debug", "--set", f"data.corpus={texts}", "--set", "train.steps=4", "--out", run]
    assert cli(*command)[0] == 0
    shutil.rmtree(run / "model")
    last, outcomes = latest_checkpoint(run), Counter()
    for write in (
        lambda path: path.write_bytes(pickle.dumps(Trap(sprung))),
        lambda path: torch.save(Trap(sprung), path),
    ):
        (last / "manifest.json").unlink()
        write(last / "state.ckpt")
        write_manifest(last, step=4, world_size=1, validation_loss=None)
        code, said = cli(*command, "--resume")
        assert not sprung.exists()
        assert_words((code, said), "")
        outcomes["refused in words, nothing ran"] += 1
    reliability("Hostile files", "checkpoints of a run that hold pickled code, with right checksums", outcomes)


def member(name: str, content: bytes = b"some words " * 99, **fields) -> tuple[tarfile.TarInfo, io.BytesIO]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, io.BytesIO(content)


def archive(path: Path, *members):
    with tarfile.open(path, "w:gz") as file:
        for info, content in (*(member(f"{i}.txt") for i in range(4)), *members):
            file.addfile(info, content)


def test_archives(cli, tmp_path, reliability):
    folder, outcomes = tmp_path / "in" / "deep", Counter()
    folder.mkdir(parents=True)
    link = {"size": 0, "type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}
    device = {"size": 0, "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5}
    archive(folder / "up.tar.gz", member("../../up.txt"), member("/up.txt"), member("a/../../../up.txt"))
    archive(folder / "links.tar.gz", member("a.txt", **link), member("b.txt", **device))
    archive(folder / "names.tar.gz", member("<script>alert(1)</script>.txt"), member("x" * 5000 + ".txt"))
    with gzip.open(folder / "promise.tar.gz", "wb") as file:  # a header for 5 TB, and nothing after it
        info = tarfile.TarInfo("big.txt")
        info.size = 5 << 40
        file.write(info.tobuf(tarfile.GNU_FORMAT))
    bomb = b'{"text": "' + b"a" * (300 << 20)
    (folder / "line.jsonl.gz").write_bytes(gzip.compress(bomb, 1))
    (folder / "line.jsonl.xz").write_bytes(lzma.compress(bomb, preset=0))
    (folder / "no.tar.gz").write_bytes(gzip.compress(os.urandom(1000)))
    before = {*tmp_path.rglob("*")}
    for path in sorted(folder.iterdir()):
        out = tmp_path / "out"
        code, said = cli("prepare", path, "--tokenizer", "bytes", "--jobs", "1", "--out", out)
        assert "Traceback" not in said, said
        if path.name.split(".")[0] in ("up", "links", "names"):
            assert code == 0, said
            outcomes["read in memory; nothing written outside the folder"] += 1
        else:
            assert_words((code, said), "")
            outcomes["refused in words"] += 1
        assert b"root:" not in b"".join(file.read_bytes() for file in out.rglob("*.tokens"))
        shutil.rmtree(out, ignore_errors=True)
    (tmp_path / "said").unlink()
    assert {*tmp_path.rglob("*")} == before
    assert not Path("/up.txt").exists()
    reliability("Hostile files", "archives: `../` and absolute members, links, devices, bombs, false sizes", outcomes)


def test_settings_that_do_not_fit(cli, tmp_path, reliability):
    outcomes = Counter()
    for harm in WRONG:
        folder = save_tiny_model(tmp_path / harm.__name__)
        harm(folder, tmp_path)
        for command in (["generate", folder, "a"], ["convert", folder, "--to", "diffllama"]):
            out = [] if command[0] == "generate" else ["--out", tmp_path / "out"]
            assert_words(cli(*command, *out, limit=60), "")
            outcomes["refused in words"] += 1
    what = "model folders: sizes, layers and types beyond the weights, weights outside, settings that are no JSON"
    reliability("Hostile files", what, outcomes)


@pytest.mark.parametrize("kind", ["without white space", "pipes and devices"])
def test_texts(cli, tmp_path, reliability, kind):
    if kind == "without white space":
        size = 1_000_000
        texts = {"a": "a" * size, "nul": "\0" * size, "marks": "!?" * (size // 2), "cjk": "\u4e2d\u6587" * (size // 6)}
        texts |= {"spaces": " " * size + "a", "lines": "\n" * size + "a"}
        for name, text in texts.items():
            (tmp_path / name).write_text(text)
            code, said = cli("prepare", tmp_path / name, "--jobs", "1", "--out", tmp_path / f"{name}.out", limit=60)
            assert code == 0 or (name in ("spaces", "lines") and code is not None and "Traceback" not in said), said
        reliability("Hostile files", "texts of 1 MB without white space, or of nothing else", {"read in a minute": 6})
        return
    os.mkfifo(tmp_path / "pipe.txt")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.txt").write_text("words")
    os.mkfifo(folder / "b.txt")
    model = save_tiny_model(tmp_path / "model")
    (model / "config.json").unlink()
    os.mkfifo(model / "config.json")
    out, corpora = ["--out", tmp_path / "out"], ("/dev/zero", tmp_path / "pipe.txt", folder)
    lines = [["prepare", corpus, "--tokenizer", "bytes", *out] for corpus in corpora]
    lines += [["train", "--recipe", "debug", "--set", f"data.corpus={corpus}", *out] for corpus in corpora]
    lines += [["generate", model, "a"], ["convert", model, *out]]
    lines += [["eval", "needle", "--model", model, "--quick", *out], ["report", tmp_path / "pipe.txt", *out]]
    for line in lines:
        assert_words(cli(*line, limit=60), "")
    outcomes = {"refused in words": len(lines)}
    reliability("Hostile files", "named pipes and devices in place of texts and models", outcomes)


NAME = "<img src=x onerror=window.ran=1>"  # of a file
ATTACK = "<script>window.ran=1;alert(1)</script><img src=x onerror=window.ran=1;alert(1)>\"'><svg onload=window.ran=1>"


@needs_chromium
def test_pages_in_a_browser(cli, tmp_path, reliability):
    """A comparison of a corpus whose texts and file names are scripts; its three pages are opened in Chromium."""
    from playwright.sync_api import sync_playwright

    texts = tmp_path / NAME
    texts.mkdir()
    for i in range(12):
        words = " ".join(f"the {a} fox {b} jumps over {ATTACK} number {i}." for a in ("red", "old") for b in range(9))
        (texts / f"<svg onload=alert(1)> {i}.txt").write_text(f"</script>{words}")
    out, pages = tmp_path / "<script>alert(1)", []
    settings = [f"data.corpus={texts}", "data.max_bytes=null", "train.steps=4", 'data.mixture={"text": 1.0}']
    settings += [
        "evaluation.needles=[[1, 1]]",
        "data.length=128",
        "evaluation.samples=1",
        "evaluation.allocation_samples=1",
    ]
    code, said = cli("compare", "--recipe", "debug", *(x for s in settings for x in ("--set", s)), "--out", out)
    assert code == 0, said
    pages.append(out / "report.html")
    for run in out.glob("members/*/run"):
        run.rename(run.with_name(NAME))
    for name, inputs in (("runs", out.glob(f"members/*/{NAME}")), ("evals", out.glob("members/*/record.json"))):
        code, said = cli("report", *inputs, "--out", tmp_path / f"{name}.html")
        assert code == 0, said
        pages.append(tmp_path / f"{name}.html")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for path in pages:
            page, dialogs = browser.new_page(), []
            page.on("dialog", lambda dialog, dialogs=dialogs: dialogs.append(dialog.message) or dialog.dismiss())
            page.goto(path.as_uri())
            page.wait_for_timeout(1500)
            assert "onerror" in page.content(), path
            assert not dialogs
            assert page.evaluate("window.ran") is None
            assert page.locator("img[src=x], svg[onload]").count() == 0
        browser.close()
    reliability(
        "Hostile files", "scripts in texts, names and prompts, in three pages opened in Chromium", {"nothing ran": 3}
    )
