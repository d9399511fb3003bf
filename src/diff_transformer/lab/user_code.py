"""Files of Python that users give: an experiment, or the plan of a study."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType


def load_file(path: Path | str) -> ModuleType:
    """The module in the file ``path``, which is executed and may import files beside it; a file such as ``random.py``
    hides no module of that name."""
    spec = spec_from_file_location(f"{__name__}.{Path(path).stem}", path)
    assert spec is not None  # for a name that ends with .py
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up there
    sys.path.append(beside := str(Path(path).resolve().parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(beside)
    return module
