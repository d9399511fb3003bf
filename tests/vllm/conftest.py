"""Models and engines for tests on vLLM. ``make test-vllm`` runs them; without vLLM they are not collected."""

import gc
import importlib.util
import os

if importlib.util.find_spec("vllm") is None:
    collect_ignore_glob = ["*.py"]
else:  # vLLM reads these when it is imported
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"  # GiB
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in the test's process
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ["HF_HUB_OFFLINE"] = "1"

import pytest


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
