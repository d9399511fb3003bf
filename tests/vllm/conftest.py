"""Models and engines for tests on vLLM. ``make test-vllm`` runs them; without vLLM they are not collected."""

import gc
import importlib.util
import json
import os
from pathlib import Path

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*.py"]
else:  # vLLM reads these when it is imported
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in the test's process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"

import pytest


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, help="write versions, counts and seconds of this run to a JSON file")


def pytest_terminal_summary(terminalreporter, config):
    if config.getoption("--record") is None:
        return
    from importlib.metadata import version

    from diff_transformer.evals.provenance import provenance

    files: dict[str, dict] = {}
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            row = files.setdefault(report.nodeid.split("::")[0], {"seconds": 0.0})
            row[outcome] = row.get(outcome, 0) + 1
            row["seconds"] = round(row["seconds"] + report.duration, 1)
    versions = {name: version(name) for name in ("vllm", "torch", "transformers", "openai", "peft")}
    record = {"benchmark": "vllm tests", "versions": versions, "files": files, "provenance": provenance(device="cpu")}
    config.getoption("--record").write_text(json.dumps(record, indent=1) + "\n")


@pytest.fixture(scope="session")
def save_model(tmp_path_factory):
    """``save_model(**fields)`` -> the model and its folder; one that was saved before is not saved again."""
    from engine_models import build

    saved = {}

    def save(**fields):
        key = repr(sorted(fields.items()))
        if key not in saved:
            folder = tmp_path_factory.mktemp("model") / "model"
            saved[key] = build(folder, **fields), folder
        return saved[key]

    return save


@pytest.fixture
def start_engine():
    """``start_engine(folder, **options)`` -> ``vllm.LLM``, freed after the test."""
    from vllm import LLM

    engines = []

    def start(folder, **options):
        defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": 256, "block_size": 32, "seed": 0}
        engines.append(LLM(str(folder), **{**defaults, **options}))
        return engines[-1]

    yield start
    for engine in engines:
        engine.llm_engine.engine_core.shutdown()
    engines.clear()
    gc.collect()
