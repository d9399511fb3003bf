import importlib.util
import json
import os
import platform
import shutil
import sys
import tempfile
import time
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():  # Triton reads it on its first import, and torch._dynamo imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")
if "PYTEST_XDIST_WORKER" not in os.environ:  # tests share a cache, of one session, and leave nothing in the user's
    KEPT = tempfile.TemporaryDirectory(prefix="diff-transformer-corpora-")
    os.environ["DIFF_TRANSFORMER_CACHE"] = KEPT.name
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a name that is no folder is refused without asking the hub
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # in each process it would take most of a GPU's memory

from diff_transformer.durable import write_whole
from diff_transformer.evals.provenance import provenance

ROOT = Path(__file__).parents[1]
KERNEL = ROOT / "src/diff_transformer/ops/cpu"


def pytest_configure():
    """Stop if the compiled CPU kernel is older than its source."""
    sources = [path.stat().st_mtime for path in KERNEL.iterdir() if path.suffix in (".cpp", ".h")]
    libraries = [path.stat().st_mtime for path in KERNEL.glob("native_*.so")]
    if (sys.platform, platform.machine()) == ("linux", "x86_64") and shutil.which("c++"):
        if not libraries or max(sources) > min(libraries):
            pytest.exit("the CPU kernel is older than its source; run: python setup.py build_ext --inplace", 2)


RECORD = ROOT / "benchmarks" / "results" / "reliability.json"


@pytest.hookimpl(wrapper=True, tryfirst=True)  # to write below the list of what was skipped
def pytest_terminal_summary(terminalreporter):
    """One line for all tests that lacked a browser, with the command that installs one."""
    yield
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    without = sum("needs Chromium" in reason for reason in skipped)
    if without:
        terminalreporter.write_line(f"skipped without a browser: {without}; to run them: apt-get install chromium")


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory():
    """Uninitialised tensors, as of torch.empty, hold NaN (integers: the largest value) during the test."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # with torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def varlen(monkeypatch):
    """``varlen(grouped=True)``: puts a stand-in for PyTorch's ``varlen_attn`` in its place; gives the list of calls."""
    from packed_attention import pytorch_varlen_attn

    from diff_transformer.ops import sdpa

    def put(grouped: bool = True) -> list:
        calls: list = []
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", pytorch_varlen_attn(calls, grouped))
        sdpa.varlen_takes_groups.cache_clear()
        return calls

    yield put
    sdpa.varlen_takes_groups.cache_clear()


@pytest.fixture(scope="session")
def texts(tmp_path_factory):
    """A folder of twelve small text files: a corpus on which a tiny model trains in seconds."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(12):
        words = " ".join(f"the {a} fox {b} jumps over dog number {i}." for a in ("red", "old") for b in range(40))
        (folder / f"{i}.txt").write_text(words)
    return folder


@pytest.fixture
def figure_module(monkeypatch):
    """``figure_module(name)``: the module figures/NAME/run.py."""

    def load(name: str):
        monkeypatch.syspath_prepend(str(ROOT / "figures"))
        spec = importlib.util.spec_from_file_location(f"{name}_page", ROOT / "figures" / name / "run.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def reliability(request):
    """``reliability(part, fault, outcomes)``: the counts of one fault, by outcome in words, to the record."""
    began = time.monotonic()

    def write(part: str, fault: str, outcomes: dict[str, int]) -> None:
        row = {"part": part, "fault": fault, "tried": sum(outcomes.values()), "outcomes": dict(outcomes)}
        row |= {"seconds": round(time.monotonic() - began, 1), "provenance": provenance(test=request.node.name)}
        rows = json.loads(RECORD.read_text())["rows"] if RECORD.exists() else []
        kept = [one for one in rows if (one["part"], one["fault"]) != (part, fault)]
        rows = sorted([*kept, row], key=lambda one: (one["part"], one["fault"]))
        write_whole(RECORD, json.dumps({"rows": rows}, indent=1) + "\n")

    return write
