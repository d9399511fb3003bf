"""Files of Python that users give: an experiment, or the plan of a study."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load_file(path: Path | str) -> ModuleType:
    """The module in the file ``path``, which is executed; it is found as the file's name without its ending."""
    spec = spec_from_file_location(Path(path).stem, path)
    assert spec is not None  # for a name that ends with .py
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    spec.loader.exec_module(module)
    return module
