"""The installed and published files: extras, metadata, the page of the package index, the source distribution."""

import functools
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
from pathlib import Path

import pytest
from command_line import cli

import diff_transformer
from diff_transformer.ops.cpu.library import LIBRARIES, path_of

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGE = ROOT / "src" / "diff_transformer"
SOURCES = [p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".cpp", ".h", ".css", ".js", ".html", ".typed")]
TRAINING = "training needs lightning_fabric and tensorboard; install with: pip install 'diff-transformer[train]'"
CORE_ONLY = (  # as if no extra were installed
    "import sys\n"
    "for name in ('lightning_fabric', 'tensorboard', 'matplotlib', 'scipy', 'vl_convert'): sys.modules[name] = None\n"
)


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-c", CORE_ONLY + code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_a_layer_a_model_and_an_experiment_do_without_extras(tmp_path):
    done = run(
        "import torch, diff_transformer as d\n"
        "from diff_transformer.cli import app\n"
        "from diff_transformer.data.tokenizer import byte_tokenizer\n"
        "from diff_transformer.model.presets import preset\n"
        "d.DiffAttention(32, 4)(torch.randn(1, 3, 32))\n"
        "folder = sys.argv[1] + '/model'\n"
        "model = d.DiffTransformerForCausalLM(preset('debug', vocab_size=258, pad_token_id=257))\n"
        "model.save_pretrained(folder); byte_tokenizer().save_pretrained(folder)\n"
        "again = d.DiffTransformerForCausalLM.from_pretrained(folder)\n"
        "assert torch.equal(again.lm_head.weight, model.lm_head.weight)\n"
        "open(sys.argv[1] + '/text.txt', 'w').write('A line of plain words. ' * 200)\n"
        "for line in ('info 3B', f'generate {folder} ab --max-new-tokens 2', f'eval outliers --model {folder} '\n"
        "             f'--quick --samples 2 --corpus {sys.argv[1]}/text.txt --out {sys.argv[1]}/outliers'):\n"
        "    app(line.split(), standalone_mode=False)\n"
        "import diff_transformer.model.convert\n",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    assert "not shown: a report needs scipy and vl_convert; install with" in done.stderr


@pytest.mark.parametrize(
    ("command", "packages", "said"),
    [
        *(
            (command, ("lightning_fabric", "tensorboard"), TRAINING)
            for command in ("train", "compare", "study ablation")
        ),
        ("eval scaling --set runs=runs.csv", ("scipy",), "a fit of scaling laws needs scipy; install with: "),
        ("eval harness --model debug", ("lm_eval",), "this experiment needs lm-evaluation-harness ("),
    ],
)
def test_a_missing_extra_is_named_before_anything_is_written(command, packages, said, monkeypatch, tmp_path):
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    done = cli(*command.split(), "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {said}")
    assert not (tmp_path / "out").exists()


def test_every_extra_that_a_message_names_exists():
    sources = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    named = set(re.findall(r"diff-transformer\[(\w+)\]", sources))
    assert named
    assert named <= PROJECT["optional-dependencies"].keys()


def test_versions_agree():
    assert PROJECT["version"] == diff_transformer.__version__
    assert f"version: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_page_of_the_package_index_stands_alone():
    """Its links are absolute, it has no images of the repository, and its code is README's, which a test runs."""
    page, readme = ((ROOT / name).read_text() for name in (PROJECT["readme"], "README.md"))
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert links
    assert all(link.startswith("https://") for link in links)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert code in readme
    extras = re.search(r"Other extras: (.*)\.", page)[1]
    assert set(re.findall(r"`(\w+)`", extras)) == PROJECT["optional-dependencies"].keys() - {"dev", "docs", "train"}


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The sdist, and the wheel built from it, by the hooks that ``python -m build`` calls, in this environment."""
    copy = tmp_path_factory.mktemp("build") / "copy"
    ignored = shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, copy, ignore=ignored)

    def built(folder: Path, kind: str) -> Path:
        code = f"from setuptools import build_meta; print(build_meta.build_{kind}('dist'))"
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stderr
        return folder / "dist" / done.stdout.split()[-1]

    sdist = built(copy, "sdist")
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4 and newer
        archive.extractall(copy.parent)
    return sdist, built(copy.parent / sdist.name.removesuffix(".tar.gz"), "wheel")


@pytest.mark.slow
def test_the_source_distribution_holds_the_package_and_no_tests(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", PROJECT["readme"], "LICENSE", "CITATION.cff"} <= names
    assert not any(name.startswith("tests/") for name in names)
    assert {path.relative_to(ROOT).as_posix() for path in SOURCES} <= names


@pytest.mark.slow
def test_the_wheel_works_in_a_fresh_environment(distributions, tmp_path):
    """Its own files, its command and its plugin; dependencies are those of this environment."""
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*pip, str(distributions[1])], check=True, timeout=240)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    folder = packages / "diff_transformer"
    installed = {path.relative_to(packages) for path in folder.rglob("*")}
    of_kernel = {path.relative_to(ROOT / "src") for path in SOURCES if path.suffix in (".cpp", ".h")}
    assert {path.relative_to(ROOT / "src") for path in SOURCES} - of_kernel <= installed
    assert not of_kernel & installed, "the wheel holds the compiled kernel instead"
    here = {path.name for path in map(path_of, LIBRARIES) if path.exists()}
    assert {path.name for path in installed if path.suffix == ".so"} == here
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    code = (
        "import sys, torch, diff_transformer as d, importlib.metadata as m\n"
        "assert d.__file__.startswith(sys.prefix), d.__file__\n"
        "assert m.version('diff-transformer') == d.__version__\n"
        "q = torch.randn(1, 2, 5, 8, requires_grad=True)\n"
        "d.diff_attention(q, q, q, q, torch.randn(1, 2, 5, 16), 0.5, is_causal=True).sum().backward()\n"
        "(plugin,) = m.entry_points(group='vllm.general_plugins', name='diff_transformer')\n"
        "print(plugin.value)\n"
    )
    run = functools.partial(subprocess.run, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=240)
    done = run([python, "-c", code])
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == PROJECT["entry-points"]["vllm.general_plugins"]["diff_transformer"]
    done = run([python.with_name("diff-transformer"), "info", "3B"])
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
