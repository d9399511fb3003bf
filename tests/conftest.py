import os

import pytest
import torch

if not torch.cuda.is_available():  # Triton reads it on its first import, and torch._dynamo imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ["DIFF_TRANSFORMER_CORPORA"] = ""  # tests leave no corpus in the user's cache
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # in each process it would take most of a GPU's memory

from diff_transformer.testing import poison_empty


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def poisoned_memory():
    """Uninitialised tensors hold NaN during the test."""
    with poison_empty():
        yield
