import pytest


@pytest.fixture(autouse=True)
def _poisoned_memory(poisoned_memory):
    """Operator tests fail where a backend reads memory that it did not write."""
