import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


@pytest.fixture(scope="session")
def example():
    """``example(name)``: the module of an example, imported once."""

    def load(name: str):
        full = f"example_{name}"
        if full not in sys.modules:
            spec = importlib.util.spec_from_file_location(full, EXAMPLES / f"{name}.py")
            sys.modules[full] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[full])
        return sys.modules[full]

    return load
